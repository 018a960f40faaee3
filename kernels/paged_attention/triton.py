"""Paged attention from Triton kernels: how a batch's work is divided, and its parts joined.

The kernels do not cap scores: with a softcap the twin computes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from inferd.kernels.cuda.device import card
from inferd.kernels.paged_attention import reference
from inferd.kernels.paged_attention.triton_decode import launch_decode
from inferd.kernels.paged_attention.triton_merge import launch_combine
from inferd.kernels.paged_attention.triton_prefill import launch_prefill, launch_prefixes
from inferd.kernels.paged_attention.triton_prefixes import Prefixes
from inferd.kernels.paged_attention.triton_tiles import Tile, decode_tile, num_splits, prefill_tile

_MIN_PREFILL_STEPS = 4  # tiles of tokens below which a part of a prefill costs more to join than it saves
_MAX_PREFILL_SPLITS = 16


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    if softcap is not None:
        return reference.paged_decode(q, kv_cache, block_tables, seq_lens, scale, window, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    max_seq_len = block_tables.shape[1] * kv_cache.shape[2]
    decode_into(out, lse, q, kv_cache, block_tables, seq_lens, scale, window, max_seq_len=max_seq_len)
    return out, lse


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    if softcap is not None:
        return reference.paged_prefill(q, kv_cache, block_tables, query_starts, seq_lens, scale, window, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    max_seq_len = block_tables.shape[1] * kv_cache.shape[2]
    arguments = (q, kv_cache, block_tables, query_starts, seq_lens, scale, window)
    prefill_into(out, lse, *arguments, max_query_len=q.shape[0], max_seq_len=max_seq_len)
    return out, lse


def prefix_attend(
    q: Tensor, kv_cache: Tensor, block_ids: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    if softcap is not None:
        return reference.prefix_attend(q, kv_cache, block_ids, scale, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    max_seq_len = block_ids.shape[0] * kv_cache.shape[2]
    starts = torch.arange(2, dtype=torch.int32, device=q.device) * q.shape[0]
    lens = torch.full((1,), max_seq_len, dtype=torch.int32, device=q.device)
    arguments = (q, kv_cache, block_ids[None], starts, lens, scale, None)
    prefill_into(out, lse, *arguments, max_query_len=q.shape[0], max_seq_len=max_seq_len, causal=False)
    return out, lse


def decode_into(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    *,
    max_seq_len: int,
    prefixes: Prefixes | None = None,
) -> None:
    """`paged_decode` into `out` and `lse`, with what rows share attended once; `max_seq_len` bounds `seq_lens`.

    What is launched depends on shapes and on the bounds alone. A window excludes prefixes.
    """
    num_rows, num_heads, size = q.shape
    if num_rows == 0:
        return
    group = num_heads // kv_cache.shape[3]
    tile = decode_tile(size, group, num_rows * kv_cache.shape[3], q.dtype, card(q.device))
    own = decode_splits(num_rows, kv_cache.shape[3], max_seq_len, tile, q.device)
    arguments = (q, kv_cache, block_tables, seq_lens)
    if own == 1 and prefixes is None:
        launch_decode(*arguments, out, lse, scale, window, tile=tile, splits=1, prefixes=None)
        return
    shared = 0
    if prefixes is not None:
        shared_tile = prefill_tile(size, num_rows * group, prefixes.max_len, kv_cache.shape[2], q.dtype, card(q.device))
        shared = prefix_splits(num_rows, group, kv_cache.shape[3], prefixes, shared_tile, q.device)
    parts = torch.empty((own + shared, *q.shape), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((own + shared, num_rows, num_heads), dtype=torch.float32, device=q.device)
    launch_decode(*arguments, parts, part_lse, scale, window, tile=tile, splits=own, prefixes=prefixes)
    if prefixes is not None:
        launch_prefixes(
            *(q, kv_cache, block_tables, prefixes, parts[own:], part_lse[own:], scale), tile=shared_tile, splits=shared
        )
    launch_combine(parts, part_lse, out, lse, own=own, prefixes=prefixes)


def prefill_into(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    *,
    max_query_len: int,
    max_seq_len: int,
    causal: bool = True,
) -> None:
    """`paged_prefill` (or, not causal, `prefix_attend`) into `out` and `lse`; the bounds choose tiles and splits."""
    num_tokens, num_heads, size = q.shape
    if num_tokens == 0:
        return
    num_kv_heads = kv_cache.shape[3]
    group = num_heads // num_kv_heads
    tile = prefill_tile(size, max_query_len * group, max_seq_len, kv_cache.shape[2], q.dtype, card(q.device))
    programs = (triton.cdiv(num_tokens * group, tile.rows) + query_starts.shape[0] - 2) * num_kv_heads
    steps = triton.cdiv(max_seq_len, tile.tokens) // _MIN_PREFILL_STEPS
    splits = num_splits(programs, steps, card(q.device).num_sms, _MAX_PREFILL_SPLITS)
    arguments = (q, kv_cache, block_tables, query_starts, seq_lens)
    if splits == 1:
        launch_prefill(*arguments, out, lse, scale, window, tile=tile, causal=causal)
        return
    parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((splits, num_tokens, num_heads), dtype=torch.float32, device=q.device)
    launch_prefill(*arguments, parts, part_lse, scale, window, tile=tile, splits=splits, causal=causal)
    launch_combine(parts, part_lse, out, lse, own=splits)


def decode_splits(num_rows: int, num_kv_heads: int, max_seq_len: int, tile: Tile, device: torch.device) -> int:
    """Enough parts that each multiprocessor has a program, with a tile of tokens for each."""
    steps = triton.cdiv(max_seq_len, tile.tokens)
    return num_splits(num_rows * num_kv_heads, steps, card(device).num_sms)


def prefix_splits(
    num_rows: int, group: int, num_kv_heads: int, prefixes: Prefixes, tile: Tile, device: torch.device
) -> int:
    """As if all rows shared one prefix: then the work is largest, and this many parts fill the card."""
    programs = triton.cdiv(num_rows * group, tile.rows) * num_kv_heads
    return num_splits(programs, triton.cdiv(prefixes.max_len, tile.tokens), card(device).num_sms, 32)
