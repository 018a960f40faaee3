"""Partial attentions joined by their log-sum-exps, as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.cuda.launch import Launcher
from inferd.kernels.paged_attention.triton_prefixes import Prefixes


@triton.jit(do_not_specialize=["num_own", "num_parts"], do_not_specialize_on_alignment=["part_lse", "row_group", "lse"])
def _combine_kernel(
    parts,
    part_lse,
    row_group,
    out,
    lse,
    num_own,
    num_parts,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    item = tl.program_id(0).to(tl.int64)
    num_items = tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    dims = tl.arange(0, PADDED)
    count = num_parts
    if HAS_PREFIX:
        count = tl.where(tl.load(row_group + item // HEADS) >= 0, num_parts, num_own)
    weight = tl.load(part_lse + lanes * num_items + item, mask=lanes < count, other=float("-inf"))
    peak = tl.max(weight, axis=0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(weight - level), axis=0)
    some = total > 0
    safe = tl.where(some, total, 1.0)
    last = tl.max(tl.where(weight > float("-inf"), lanes, -1), axis=0)
    merged = tl.zeros([PADDED], tl.float32)
    for begin in range(0, last + 1, STEP):  # of short rows, most parts are empty
        some_lanes = begin + tl.arange(0, STEP)
        sources = some_lanes * num_items + item
        share = tl.load(part_lse + sources, mask=some_lanes < count, other=float("-inf"))
        mask = (share > float("-inf"))[:, None] & (dims < SIZE)[None, :]
        sums = tl.load(parts + sources[:, None] * SIZE + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        merged += tl.sum(sums * tl.exp(share - level)[:, None], axis=0)
    tl.store(out + item * SIZE + dims, (merged / safe).to(out.dtype.element_ty), mask=dims < SIZE)
    tl.store(lse + item, tl.where(some, peak + tl.log(safe), float("-inf")))


@triton.jit
def _merge_kernel(out_a, lse_a, out_b, lse_b, out, SIZE: tl.constexpr, PADDED: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    item = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    mask = dims < SIZE
    level_a, level_b = tl.load(lse_a + item), tl.load(lse_b + item)
    peak = tl.maximum(level_a, level_b)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a, weight_b = tl.exp(level_a - peak), tl.exp(level_b - peak)
    total = weight_a + weight_b
    total = tl.where(total == 0.0, 1.0, total)
    lanes = item * SIZE + dims
    merged = tl.load(out_a + lanes, mask=mask, other=0.0).to(tl.float32) * (weight_a / total)
    merged += tl.load(out_b + lanes, mask=mask, other=0.0).to(tl.float32) * (weight_b / total)
    tl.store(out + lanes, merged.to(out.dtype.element_ty), mask=mask)


_combine = Launcher(_combine_kernel)
_merge = Launcher(_merge_kernel)


def launch_combine(
    parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, *, own: int, prefixes: Prefixes | None = None
) -> None:
    """parts[s, n, hq, d], part_lse[s, n, hq] -> out[n, hq, d], lse[n, hq] f32.

    Rows that share no prefix have only the first `own` parts. Sums of a part whose log-sum-exp is -inf are not read.
    """
    count, num_rows, num_heads, size = parts.shape
    lanes = triton.next_power_of_2(count)
    _combine(
        (num_rows * num_heads, 1, 1),
        (parts, part_lse, part_lse if prefixes is None else prefixes.row_group, out, lse, own, count),
        {
            "HEADS": num_heads,
            "SIZE": size,
            "PADDED": triton.next_power_of_2(size),
            "HAS_PREFIX": prefixes is not None,
            "LANES": lanes,
            "STEP": min(lanes, 16),
        },
        device=out.device,
        num_warps=4 if count * size >= 2048 else 1,
    )


def merge_lse(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    num_rows, num_heads, size = out.shape
    if num_rows == 0:
        return out
    _merge(
        (num_rows * num_heads, 1, 1),
        (out_a.contiguous(), lse_a.contiguous(), out_b.contiguous(), lse_b.contiguous(), out),
        {"SIZE": size, "PADDED": triton.next_power_of_2(size)},
        device=out.device,
        num_warps=1,
    )
    return out
