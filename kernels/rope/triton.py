"""Rotary embedding and the store of keys and values as one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.cuda.launch import Launcher

_HEADS = 8  # of one program


@triton.jit
def _rotated(source, mask, cos, sin, SIZE: tl.constexpr):
    """The rotated halves of some heads, in the dtype that they are stored in."""
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + SIZE // 2, mask=mask, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _rope_store_kernel(
    q,
    k,
    v,
    positions,
    cos_sin,
    keys,
    slots,
    q_stride,
    k_stride,
    v_stride,
    plane_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half = tl.arange(0, HALF)
    inside = half < SIZE // 2
    angles = cos_sin + tl.load(positions + token) * SIZE + half
    cos = tl.load(angles, mask=inside, other=0.0)[None, :]
    sin = tl.load(angles + SIZE // 2, mask=inside, other=0.0)[None, :]
    if part < QUERY_PROGRAMS:
        heads = part * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_HEADS)[:, None] & inside[None, :]
        source = q + token * q_stride + heads[:, None] * SIZE + half[None, :]
        first, second = _rotated(source, mask, cos, sin, SIZE)
        tl.store(source, first, mask=mask)
        tl.store(source + SIZE // 2, second, mask=mask)
    else:
        heads = (part - QUERY_PROGRAMS) * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_KV_HEADS)[:, None] & inside[None, :]
        lanes = heads[:, None] * SIZE + half[None, :]
        first, second = _rotated(k + token * k_stride + lanes, mask, cos, sin, SIZE)
        tl.store(k + token * k_stride + lanes, first, mask=mask)
        tl.store(k + token * k_stride + lanes + SIZE // 2, second, mask=mask)
        slot = tl.load(slots + token)
        if slot >= 0:
            key = keys + slot * slot_stride + lanes
            tl.store(key, first, mask=mask)
            tl.store(key + SIZE // 2, second, mask=mask)
            source = v + token * v_stride + lanes
            tl.store(key + plane_stride, tl.load(source, mask=mask, other=0.0), mask=mask)
            last = tl.load(source + SIZE // 2, mask=mask, other=0.0)
            tl.store(key + plane_stride + SIZE // 2, last, mask=mask)


_rope_store = Launcher(_rope_store_kernel)


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv_cache: Tensor, slots: Tensor
) -> None:
    num_tokens, num_heads, size = q.shape
    num_kv_heads = k.shape[1]
    if num_tokens == 0:
        return
    query_programs = triton.cdiv(num_heads, _HEADS)
    strides = (q.stride(0), k.stride(0), v.stride(0), kv_cache.stride(0), kv_cache.stride(2))
    _rope_store(
        (num_tokens, query_programs + triton.cdiv(num_kv_heads, _HEADS), 1),
        (q, k, v, positions, cos_sin, kv_cache, slots, *strides),
        {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "SIZE": size,
            "HALF": triton.next_power_of_2(size // 2),
            "HEADS": _HEADS,
            "QUERY_PROGRAMS": query_programs,
        },
        device=q.device,
    )
