"""Names of architectures that pool: what they are made of, by the name of what generates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

DECODER_FAMILIES = ("Gemma2", "Llama", "Mistral", "Qwen2", "Qwen3")
_CLASSIFIER, _BARE = "ForSequenceClassification", "Model"

DecoderKind = Literal["causal", "decoder", "classifier"]

POOLED_DECODERS: Mapping[str, tuple[str, DecoderKind]] = {
    **{f"{family}{_CLASSIFIER}": (f"{family}ForCausalLM", "classifier") for family in DECODER_FAMILIES},
    **{f"{family}{_BARE}": (f"{family}ForCausalLM", "decoder") for family in DECODER_FAMILIES},
}
"""Architecture → the one that generates with the same layers, and what it has in place of its head of logits."""


def split(architecture: str) -> tuple[str, DecoderKind]:
    """As `POOLED_DECODERS` has it; an architecture that generates is its own."""
    return POOLED_DECODERS.get(architecture, (architecture, "causal"))
