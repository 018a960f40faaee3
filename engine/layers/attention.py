"""The part of an attention layer that meets paged memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inferd.engine.attention.context import current
from inferd.engine.core.kv.spec import EncoderOnlySpec, KVSpec, SlidingWindowSpec
from inferd.engine.layers.rotary import RopeTable
from inferd.engine.layers.target import BuildTarget


@dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys."""

    scale: float
    window: int | None = None  # a query at position p sees the keys at (p - window, p]
    softcap: float | None = None  # a scaled score s counts as softcap * tanh(s / softcap)


class Attention:
    """Rotates q and k, stores k and v, then attends through the step's backend.

    `name` is unique in the model: it finds the layer's KV cache. Keys and values of all rows are stored before any row
    attends, so a row may read blocks that another row of the same step fills.
    """

    def __init__(
        self, name: str, num_kv_heads: int, head_size: int, rope: RopeTable, scores: Scores, target: BuildTarget
    ) -> None:
        self.name = name
        self._num_kv_heads = num_kv_heads
        self._head_size = head_size
        self._rope = rope
        self._window = scores.window
        self._dtype = target.dtype
        self._scores: tuple[Any, ...] = (scores.scale, scores.window, scores.softcap)
        if scores.softcap is None:
            self._scores = self._scores[:2]
        self._rope_store = target.ops.rope_store

    def kv_spec(self, block_size: int) -> KVSpec:
        """What this layer keeps, on this rank."""
        fields = (block_size, self._num_kv_heads, self._head_size, self._dtype)
        return KVSpec(*fields) if self._window is None else SlidingWindowSpec(*fields, self._window)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """q[t, hq, d], k[t, hk, d], v[t, hk, d], positions[t] i64 -> [t, hq, d]. Changes q and k in place."""
        context = current()
        kv_cache, slots, metadata = context.layer(self.name)
        self._rope_store(q, k, v, positions, self._rope.cos_sin, kv_cache, slots)
        return context.backend.attend(q, kv_cache, metadata, *self._scores)


class EncoderAttention:
    """Every token attends to all tokens of its request, which is whole in the step. Nothing is kept."""

    def __init__(self, name: str, num_heads: int, head_size: int, target: BuildTarget) -> None:
        self.name = name
        self._num_heads = num_heads
        self._head_size = head_size
        self._dtype = target.dtype
        self._scale = head_size**-0.5

    def kv_spec(self, block_size: int) -> EncoderOnlySpec:
        return EncoderOnlySpec(block_size, self._num_heads, self._head_size, self._dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v[t, h, d] -> [t, h, d]."""
        context = current()
        return context.backend.attend_whole(q, k, v, context.whole, self._scale)
