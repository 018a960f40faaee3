"""Paged attention of many query tokens as a Triton kernel: ragged, causal, with a window, or all tokens over a prefix.

A tile's rows are query tokens times the heads of one key head, so keys and values are read once for the group and any
group size packs densely. Tiles of a ragged batch are numbered so that the grid follows from shapes alone: sequence r
begins at tile `starts[r] * group // rows + r`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from inferd.kernels.cuda.device import card
from inferd.kernels.cuda.launch import Launcher
from inferd.kernels.paged_attention.triton_prefixes import Prefixes
from inferd.kernels.paged_attention.triton_tiles import LOG2_E, Tile, find_pages, normalised, token_pointers


@triton.jit
def _find_sequence(starts, num_sequences, tile, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The last sequence that begins at `tile` or before."""
    lanes = tl.arange(0, 128)
    found = 0
    for base in range(0, num_sequences, 128):
        sequence = base + lanes
        start = tl.load(starts + sequence, mask=sequence < num_sequences, other=0)
        begins = (start * GROUP // ROWS + sequence <= tile) & (sequence < num_sequences)
        found += tl.sum(begins.to(tl.int32), axis=0)
    return found - 1


# fmt: off
@triton.jit
def _load_tile(
    plane, bulk, pages, begin, kv_head, written, num_slots, plane_stride, page_stride, slot_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
    BULK: tl.constexpr,
):
    # fmt: on
    """Keys and values [TOKENS, PADDED]. Values that no row may see are zeros: a weight of zero does not undo a NaN."""
    if BULK:
        slot = (pages * PAGE + begin % PAGE).to(tl.int32)
        key = bulk.load([slot, kv_head * SIZE])
        value = bulk.load([slot + num_slots, kv_head * SIZE])
        if MASKED:
            value = tl.where(written[:, None], value, 0.0)
    else:
        dims = tl.arange(0, PADDED)
        lanes = tl.arange(0, TOKENS)
        source = token_pointers(plane, pages, begin, lanes, dims, page_stride, slot_stride, PAGE, TOKENS)
        if MASKED:
            mask = written[:, None] & (dims < SIZE)[None, :]
            key = tl.load(source, mask=mask, other=0.0)
            value = tl.load(source + plane_stride, mask=mask, other=0.0)
        elif PADDED > SIZE:
            key = tl.load(source, mask=(dims < SIZE)[None, :], other=0.0)
            value = tl.load(source + plane_stride, mask=(dims < SIZE)[None, :], other=0.0)
        else:
            key = tl.load(source)
            value = tl.load(source + plane_stride)
    return key, value


# fmt: off
@triton.jit
def _attend(
    query, sums, total, peak, plane, bulk, table, kv_head, positions, low, high, first_seen, scale, window,
    num_slots, plane_stride, page_stride, slot_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
):
    # fmt: on
    """One more stretch of tokens [low, high) for all rows of the tile; MASKED where some row does not see all of it."""
    lanes = tl.arange(0, TOKENS)
    pages = find_pages(table, low, high, lanes, PAGE, TOKENS)
    for begin in range(low, high, TOKENS):
        begin = tl.multiple_of(begin, TOKENS)
        tokens = begin + lanes
        written = (tokens >= first_seen) & (tokens < high)
        key, value = _load_tile(
            *(plane, bulk, pages, begin, kv_head, written, num_slots, plane_stride, page_stride, slot_stride),
            *(SIZE, PADDED, TOKENS, PAGE, MASKED, BULK),
        )
        pages = find_pages(table, begin + TOKENS, high, lanes, PAGE, TOKENS)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            seen = written[None, :]
            if CAUSAL:
                seen &= tokens[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen &= tokens[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        risen = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        level = risen
        if MASKED:  # a row may have seen nothing so far
            level = tl.where(risen == float("-inf"), 0.0, risen)
        weights = tl.exp2(scores * scale - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(value.dtype), value, sums * fade[:, None], input_precision=PRECISION)
        peak = risen
    return sums, total, peak


# fmt: off
@triton.jit
def _stretches(
    first, last, end, split, num_splits, window,
    TOKENS: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):
    # fmt: on
    """One part of what the queries at positions `first` to `last` see: [low, high), and [full, ragged) inside of it
    where each of them sees every token; the first token that any of them sees comes last."""
    first_seen = 0
    if CAUSAL:
        end = last + 1
    if HAS_WINDOW:
        first_seen = tl.maximum(first + 1 - window, 0)
    begin = first_seen // TOKENS * TOKENS
    share = tl.cdiv(tl.cdiv(end - begin, TOKENS), num_splits) * TOKENS
    low = begin + split * share
    high = tl.minimum(low + share, end)
    full = low
    if HAS_WINDOW:
        full = tl.cdiv(tl.maximum(last + 1 - window, 0), TOKENS) * TOKENS
        full = tl.minimum(tl.maximum(full, low), high)
    ragged = end // TOKENS * TOKENS
    if CAUSAL:
        ragged = (first + 1) // TOKENS * TOKENS
    ragged = tl.minimum(tl.maximum(ragged, full), high)
    return low, full, ragged, high, first_seen


# fmt: off
@triton.jit(  # what changes from step to step is no reason to compile anew
    do_not_specialize=["num_sequences", "num_tokens", "table_stride"],
    do_not_specialize_on_alignment=["tables", "starts", "seq_lens", "order", "lse"],
)
def _prefill_kernel(
    q, keys, bulk, tables, starts, seq_lens, order, out, lse, scale, num_sequences, num_tokens, num_slots,
    q_stride, table_stride, plane_stride, page_stride, slot_stride, window,
    GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, DIVIDED: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, ORDERED: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr, DEPENDENT: tl.constexpr,
):
    # fmt: on
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first, so that the short ones fill the end
    split = tl.program_id(2)
    sequence = _find_sequence(starts, num_sequences, tile, GROUP, ROWS)
    start = tl.load(starts + sequence)
    query_len = tl.load(starts + sequence + 1) - start
    first_row = (tile - (start * GROUP // ROWS + sequence)) * ROWS
    if first_row >= query_len * GROUP:
        return

    rows = first_row + tl.arange(0, ROWS)
    live = rows < query_len * GROUP
    dims = tl.arange(0, PADDED)
    mask = live[:, None] & (dims < SIZE)[None, :]
    if ORDERED:  # the tokens that share a prefix, and the table of any of them
        token = tl.load(order + start + rows // GROUP, mask=live, other=0).to(tl.int64)
        table = tables + tl.load(order + start).to(tl.int64) * table_stride
    else:
        token = (start + rows // GROUP).to(tl.int64)
        table = tables + sequence.to(tl.int64) * table_stride
    heads = kv_head * GROUP + rows % GROUP
    query = tl.load(q + (token * q_stride + heads * SIZE)[:, None] + dims[None, :], mask=mask, other=0.0)

    seq_len = tl.load(seq_lens + sequence)
    context = seq_len - query_len
    first = context + first_row // GROUP
    last = context + (tl.minimum(first_row + ROWS, query_len * GROUP) - 1) // GROUP
    positions = tl.minimum(context + rows // GROUP, last)
    low, full, ragged, high, first_seen = _stretches(
        first, last, seq_len, split, tl.num_programs(2), window, TOKENS, CAUSAL, HAS_WINDOW
    )
    plane = keys + kv_head * SIZE
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    if HAS_WINDOW:
        sums, total, peak = _attend(
            *(query, sums, total, peak, plane, bulk, table, kv_head, positions, low, full, first_seen, scale, window),
            *(num_slots, plane_stride, page_stride, slot_stride),
            *(SIZE, PADDED, TOKENS, PAGE, True, CAUSAL, True, PRECISION, BULK),
        )
    sums, total, peak = _attend(
        *(query, sums, total, peak, plane, bulk, table, kv_head, positions, full, ragged, first_seen, scale, window),
        *(num_slots, plane_stride, page_stride, slot_stride),
        *(SIZE, PADDED, TOKENS, PAGE, False, CAUSAL, HAS_WINDOW, PRECISION, BULK),
    )
    sums, total, peak = _attend(
        *(query, sums, total, peak, plane, bulk, table, kv_head, positions, ragged, high, first_seen, scale, window),
        *(num_slots, plane_stride, page_stride, slot_stride),
        *(SIZE, PADDED, TOKENS, PAGE, True, CAUSAL, HAS_WINDOW, PRECISION, BULK),
    )

    result, log_sum = normalised(sums, total, peak)
    num_heads = tl.num_programs(0) * GROUP
    slot = (split.to(tl.int64) * num_tokens + token) * num_heads + heads
    if DIVIDED:  # nobody reads the sums of a part that saw nothing
        mask &= low < high
    tl.store(out + slot[:, None] * SIZE + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + slot, log_sum, mask=live)


_prefill = Launcher(_prefill_kernel)


def launch_prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    *,
    tile: Tile,
    splits: int = 1,
    causal: bool = True,
    order: Tensor | None = None,
) -> None:
    """q[t, hq, d] of the sequences that `query_starts[n + 1]` bounds -> out[splits, t, hq, d], lse[splits, t, hq] f32.

    Not causal: every query sees all of its sequence's `seq_lens` tokens. `order`: the tokens' indices in q where they
    do not lie in order; then the sequence's blocks are those of its first token's row of `block_tables`.
    """
    num_tokens, num_heads, size = q.shape
    num_kv_heads = kv_cache.shape[3]
    group = num_heads // num_kv_heads
    num_sequences = query_starts.shape[0] - 1
    num_slots = kv_cache.shape[1] * kv_cache.shape[2]
    # The bulk copy engine takes whole tiles: of one page, and of heads whose size is a power of two.
    bulk = (
        card(q.device).capability >= (9, 0)
        and tile.tokens <= kv_cache.shape[2]
        and size & (size - 1) == 0
        and size >= 64
    )
    rows_of_heads = kv_cache.view(2 * num_slots, num_kv_heads * size)
    bulk_rows = TensorDescriptor.from_tensor(rows_of_heads, [tile.tokens, size]) if bulk else kv_cache
    tensors = (q, kv_cache, bulk_rows, block_tables, query_starts, seq_lens, seq_lens if order is None else order)
    strides = (q.stride(0), block_tables.stride(0), *kv_cache.stride()[:3])
    _prefill(
        (num_kv_heads, num_tokens * group // tile.rows + num_sequences, splits),
        (*tensors, out, lse, scale * LOG2_E, num_sequences, num_tokens, num_slots, *strides, window or 0),
        {
            "GROUP": group,
            "SIZE": size,
            "PADDED": triton.next_power_of_2(size),
            "ROWS": tile.rows,
            "TOKENS": tile.tokens,
            "PAGE": kv_cache.shape[2],
            "DIVIDED": splits > 1,
            "CAUSAL": causal,
            "HAS_WINDOW": window is not None,
            "ORDERED": order is not None,
            "PRECISION": "ieee" if q.dtype.itemsize == 4 else "tf32",
            "BULK": bulk,
        },
        device=q.device,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def launch_prefixes(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    prefixes: Prefixes,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    tile: Tile,
    splits: int,
) -> None:
    """Each row that shares a prefix over all of it; the other rows' parts are left as they are."""
    launch_prefill(
        *(q, kv_cache, block_tables, prefixes.starts, prefixes.lens, out, lse, scale, None),
        tile=tile,
        splits=splits,
        causal=False,
        order=prefixes.rows,
    )
