"""Reads of a GGUF file's hyperparameters, which stand below the architecture's name."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping

from inferd.engine.loader.gguf_header import GGUFHeader, Value

# Keys that change what the model computes in ways that the supported architectures here do not have, with the value
# that changes nothing.
_NEUTRAL: Mapping[str, Value | None] = {
    "expert_count": 0,
    "use_parallel_residual": False,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": None,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope.scale_linear": 1.0,
}


class Fields:
    """Reads of keys below the architecture's prefix."""

    def __init__(self, header: GGUFHeader, prefix: str) -> None:
        self.header = header
        self._prefix = prefix

    def key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def has(self, name: str) -> bool:
        return self.key(name) in self.header.metadata

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.header.integer(self.key(name), default)
        if not 0 < value < 2**31:
            raise self.header.error(f"metadata {self.key(name)}", f"must be positive and below 2^31, not {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.header.number(self.key(name), default)
        if not (math.isfinite(value) and value > 0):
            raise self.header.error(f"metadata {self.key(name)}", f"must be positive, not {value}")
        return shortest_float32(value)

    def refuse_unsupported(self, served: Collection[str] = ()) -> None:
        """`served`: those of these keys that the architecture has a use for."""
        for name, neutral in _NEUTRAL.items():
            if name in served:
                continue
            value = self.header.metadata.get(self.key(name), neutral)
            if value != neutral:
                raise self.header.error(f"metadata {self.key(name)}", f"{str(value)[:40]} is not supported")


def shortest_float32(value: float) -> float:
    """The shortest decimal that means the same float32: 1e-05 instead of 9.999999747378752e-06."""
    if abs(value) > 3e38:
        return value
    wanted = struct.pack("<f", value)
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next((float(text) for text in texts if struct.pack("<f", float(text)) == wanted), value)
