"""Paged decode as a Triton kernel: one query token a row, its tokens divided over programs.

All query heads of a key head form one tile, so that keys and values are read once. How many parts a row is divided
into is fixed at launch; where they begin and end is computed from its length on the card, so a captured launch serves
any length.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.cuda.launch import Launcher
from inferd.kernels.cuda.prefetch import prefetch
from inferd.kernels.paged_attention.triton_prefixes import Prefixes
from inferd.kernels.paged_attention.triton_tiles import LOG2_E, Tile, find_pages, normalised, token_pointers


# fmt: off
@triton.jit(  # what changes from step to step is no reason to compile anew
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "row_group", "prefix_lens", "lse"],
)
def _decode_kernel(
    q, keys, tables, seq_lens, row_group, prefix_lens, out, lse, scale,
    q_stride, table_stride, plane_stride, page_stride, slot_stride, window,
    GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, DIVIDED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_PREFIX: tl.constexpr,
    PRECISION: tl.constexpr, LINE: tl.constexpr, DEPENDENT: tl.constexpr,
):
    # fmt: on
    if DEPENDENT:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    num_rows = tl.num_programs(1)
    num_splits = tl.num_programs(2)

    seq_len = tl.load(seq_lens + row)
    first = 0
    if HAS_PREFIX:
        group = tl.load(row_group + row)
        if group >= 0:
            first = tl.load(prefix_lens + group)
    if HAS_WINDOW:
        first = tl.maximum(first, seq_len - window)
    start = first // TOKENS * TOKENS
    steps = tl.cdiv(tl.maximum(seq_len - start, 0), TOKENS)
    share = tl.cdiv(steps, num_splits) * TOKENS
    low = start + split * share
    high = tl.minimum(low + share, seq_len)

    lanes = tl.arange(0, TOKENS)
    dims = tl.arange(0, PADDED)
    members = tl.arange(0, ROWS)
    live = (members < GROUP)[:, None] & (dims < SIZE)[None, :]
    head_lanes = (kv_head * GROUP + members)[:, None] * SIZE + dims[None, :]
    plane = keys + kv_head * SIZE
    table = tables + row * table_stride
    pages = find_pages(table, low, high, lanes, PAGE, TOKENS)
    if DEPENDENT:  # lengths and tables do not change within a step; q, and this step's keys and values, do
        lines = tl.arange(0, PADDED // LINE) * LINE
        nearest = token_pointers(plane, pages, low, lanes, lines, page_stride, slot_stride, PAGE, TOKENS)
        if low < high:
            prefetch(nearest)
            prefetch(nearest + plane_stride)
        gdc_wait()
    query = tl.load(q + row * q_stride + head_lanes, mask=live, other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    for begin in range(low, high, TOKENS):
        tokens = begin + lanes
        seen = (tokens >= first) & (tokens < high)
        mask = seen[:, None] & (dims < SIZE)[None, :]
        source = token_pointers(plane, pages, begin, lanes, dims, page_stride, slot_stride, PAGE, TOKENS)
        pages = find_pages(table, begin + TOKENS, high, lanes, PAGE, TOKENS)
        key = tl.load(source, mask=mask, other=0.0)
        value = tl.load(source + plane_stride, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        risen = tl.maximum(peak, tl.max(scores, axis=1))
        fade = tl.exp2(peak - risen)
        weights = tl.exp2(scores - risen[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(value.dtype), value, sums * fade[:, None], input_precision=PRECISION)
        peak = risen

    result, log_sum = normalised(sums, total, peak)
    num_heads = num_kv_heads * GROUP
    slot = (split * num_rows + row) * num_heads
    if DIVIDED:  # nobody reads the sums of a part that saw nothing
        live &= low < high
    tl.store(out + slot * SIZE + head_lanes, result.to(out.dtype.element_ty), mask=live)
    tl.store(lse + slot + kv_head * GROUP + members, log_sum, mask=members < GROUP)


_decode = Launcher(_decode_kernel)


def launch_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    *,
    tile: Tile,
    splits: int,
    prefixes: Prefixes | None,
) -> None:
    """q[n, hq, d] -> out[splits, n, hq, d], lse[splits, n, hq] f32; a part that saw nothing has -inf, and
    no sums where there are several parts.

    With `prefixes` a row's own part begins after what it shares.
    """
    num_rows, num_heads, size = q.shape
    num_kv_heads = kv_cache.shape[3]
    groups = (seq_lens, seq_lens) if prefixes is None else (prefixes.row_group, prefixes.lens)
    strides = (q.stride(0), block_tables.stride(0), *kv_cache.stride()[:3])
    _decode(
        (num_kv_heads, num_rows, splits),
        (q, kv_cache, block_tables, seq_lens, *groups, out, lse, scale * LOG2_E, *strides, window or 0),
        {
            "GROUP": num_heads // num_kv_heads,
            "SIZE": size,
            "PADDED": triton.next_power_of_2(size),
            "ROWS": tile.rows,
            "TOKENS": tile.tokens,
            "PAGE": kv_cache.shape[2],
            "DIVIDED": splits > 1,
            "HAS_WINDOW": window is not None,
            "HAS_PREFIX": prefixes is not None,
            "PRECISION": "ieee" if q.dtype.itemsize == 4 else "tf32",
            "LINE": min(128 // q.dtype.itemsize, triton.next_power_of_2(size)),
        },
        device=q.device,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
