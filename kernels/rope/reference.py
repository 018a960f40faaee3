"""Rotary embedding and the store of keys and values, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv_cache: Tensor, slots: Tensor
) -> None:
    """Rotate q and k in place, then write k and v into the cache at their slots; slot -1 writes nothing.

    q[n, hq, d], k[n, hk, d], v[n, hk, d], positions[n] i64, cos_sin[max_pos, d] f32 (cosines of the d/2 angles, then
    their sines), slots[n] i64. Rotation by halves (NeoX order): dimension i pairs with i + d/2; float32 inside.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [n, 1, d/2]
    _rotate(q, cos, sin)
    _rotate(k, cos, sin)
    keys, values = (part.view(-1, *part.shape[2:]) for part in kv_cache)
    stored = slots >= 0
    slots = slots[stored]
    keys.index_copy_(0, slots, k[stored])
    values.index_copy_(0, slots, v[stored])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    first, second = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
