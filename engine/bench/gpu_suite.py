"""The work that is timed on a card, and what others reach on the same: Llama-3.1-8B's shapes with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferd.engine.bench.workloads import Workload

PEER = "vLLM 0.25.1, same kind of card (one H200), measured 2026-11-30"
# Of the floors: what one H200 was measured to reach, without any gap between kernels.
FLOOR = "15.0 GB of weights a step at 4.04 TB/s, KV at 4.1 TB/s, 13.96 GFLOP a prompt token at 770 TFLOP/s"
PEER_READY_S = (58.0, 90.0)
READY_TARGET_S = 8.0


@dataclass(frozen=True)
class GpuRow:
    """One workload with its yardsticks, in tokens per second of what `counts` says."""

    workload: Workload
    peer: tuple[float, float]  # two runs
    target: float
    floor_s: float
    counts: str = "output"  # "output", "prompt", or "decode": output tokens after every request has its first one

    @property
    def name(self) -> str:
        return self.workload.name


def _row(
    name: str,
    shape: tuple[int, int, int],
    peer: tuple[float, float],
    target: float,
    floor_s: float,
    counts: str = "output",
    *,
    shared: int = 0,
) -> GpuRow:
    num_requests, own_tokens, output_tokens = shape
    workload = Workload(name, num_requests, shared, own_tokens, output_tokens, primed=shared > 0)
    return GpuRow(workload, peer, target, floor_s, counts)


GPU_SUITE = (
    _row("b1", (1, 128, 256), (203, 208), 228, 0.95),
    _row("b8", (8, 512, 256), (1454, 1486), 1650, 1.06),
    _row("b32", (32, 512, 256), (4371, 4442), 4900, 1.42),
    _row("b128", (128, 512, 256), (8590, 8822), 9700, 2.82),
    _row("b256", (256, 512, 256), (9697, 9987), 11000, 5.01),
    _row("prefill", (16, 4096, 1), (40707, 41633), 44000, 1.31, "prompt"),
    _row("long_decode", (32, 8192, 128), (475, 483), 515, 7.24),
    _row("prefix", (64, 64, 64), (4350, 4845), 8500, 0.34, shared=4096),
    _row("long1", (1, 65536, 256), (146, 146), 158, 1.48, "decode"),
    _row("long4", (4, 32768, 256), (456, 456), 475, 2.02, "decode"),
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": [128001, 128008, 128009],
    "bos_token_id": 128000,
    "torch_dtype": "bfloat16",
}


def make_dummy_model(folder: Path, **changes: Any) -> Path:
    """A folder that `load_format="dummy"` can load: there are neither weights nor a tokenizer. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes, indent=2), encoding="utf-8")
    return folder


def select_rows(names: str | None) -> list[GpuRow]:
    """Comma-separated names, or all. Raises ValueError for a name that is not there."""
    wanted = names.split(",") if names else [row.name for row in GPU_SUITE]
    known = {row.name: row for row in GPU_SUITE}
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no row {name!r} in the GPU suite; there are: {', '.join(known)}")
    return [known[name] for name in wanted]
