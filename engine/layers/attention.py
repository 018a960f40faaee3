"""The part of an attention layer that meets paged memory."""

from __future__ import annotations

from torch import Tensor

from inferd.engine.attention.context import current
from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.layers.target import BuildTarget


class Attention:
    """Rotates q and k, stores k and v, then attends through the step's backend.

    `name` is unique in the model: it finds the layer's KV cache. Keys and values of all rows are stored before any row
    attends, so a row may read blocks that another row of the same step fills.
    """

    def __init__(
        self, name: str, num_kv_heads: int, head_size: int, cos_sin: Tensor, window: int | None, target: BuildTarget
    ) -> None:
        """`cos_sin`: see `rope_table`. `window`: a query at position p sees the keys at (p - window, p]."""
        self.name = name
        self._num_kv_heads = num_kv_heads
        self._head_size = head_size
        self._cos_sin = cos_sin
        self._window = window
        self._dtype = target.dtype
        self._scale = head_size**-0.5
        self._rope_store = target.ops.rope_store

    def kv_spec(self, block_size: int) -> KVSpec:
        return KVSpec(block_size, self._num_kv_heads, self._head_size, self._dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """q[t, hq, d], k[t, hk, d], v[t, hk, d], positions[t] i64 -> [t, hq, d]. Changes q and k in place."""
        context = current()
        kv_cache, slots, metadata = context.layer(self.name)
        self._rope_store(q, k, v, positions, self._cos_sin, kv_cache, slots)
        return context.backend.attend(q, kv_cache, metadata, self._scale, self._window)
