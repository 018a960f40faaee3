"""Attention over a paged cache in plain torch.

Pages may hold anything, NaN included, outside of the tokens that a row may see: masked lanes never enter a sum.
`lse` is the natural log-sum-exp of a row's scaled scores, the weight of a partial result when two are merged. With a
`softcap` c each scaled score s becomes c * tanh(s / c) first (Gemma 2).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from inferd.kernels.paged_attention.dense import attend_with_lse


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One query token a row, the last of its `seq_lens` tokens; with a window w it sees the last w of them.

    q[n, hq, d], block_tables[n, m] i32 (valid up to a row's last token), seq_lens[n] i32
    -> (out[n, hq, d], lse[n, hq] f32). A row of length 0 gives zeros and -inf.
    """
    num_rows, num_heads, head_size = q.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_blocks = block_tables.shape[1]
    tokens = torch.arange(num_blocks * block_size, device=q.device)
    visible = tokens < seq_lens[:, None]  # [n, L]
    if window is not None:
        visible &= tokens >= seq_lens[:, None] - window
    used = visible.view(num_rows, num_blocks, block_size).any(-1)
    pages = torch.where(used, block_tables, 0).long()
    hidden = ~visible[:, :, None, None]
    keys, values = (part[pages].flatten(1, 2).masked_fill_(hidden, 0.0).transpose(1, 2) for part in kv_cache)
    grouped = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
    out, lse = attend_with_lse(grouped, keys, values, scale, visible[:, None, None, :], softcap)
    return out.reshape(q.shape), lse.reshape(num_rows, num_heads)


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
    """Causal attention of ragged rows: row r owns the queries from query_starts[r] up to query_starts[r + 1].

    They are the last of its `seq_lens[r]` tokens; with a window w, the query at position p sees keys in (p - w, p].
    q[t, hq, d], block_tables[n, m] i32, query_starts[n + 1] i32, seq_lens[n] i32 -> (out[t, hq, d], lse[t, hq] f32).
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    lens = seq_lens.tolist()
    for row, (begin, end) in enumerate(pairwise(query_starts.tolist())):
        context = lens[row] - (end - begin)
        first = 0 if window is None else max(0, context + 1 - window)
        keys = torch.arange(first, lens[row], device=q.device)
        positions = torch.arange(context, lens[row], device=q.device)[:, None]
        visible = keys <= positions
        if window is not None:
            visible &= keys > positions - window
        out[begin:end], lse[begin:end] = _attend_tokens(
            q[begin:end], kv_cache, block_tables[row], keys, visible, scale, softcap
        )
    return out, lse


def prefix_attend(
    q: Tensor, kv_cache: Tensor, block_ids: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Every row over all tokens of the same full blocks, which all lie before it.

    q[n, hq, d], block_ids[b] i32 -> (out[n, hq, d], lse[n, hq] f32).
    """
    tokens = torch.arange(len(block_ids) * kv_cache.shape[2], device=q.device)
    return _attend_tokens(q, kv_cache, block_ids, tokens, None, scale, softcap)


def merge_lse(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Attention over the union of two disjoint sets of keys from the results over each; float32 inside.

    out[n, hq, d], lse[n, hq] f32 -> [n, hq, d] in out_a's dtype. A side with lse -inf saw nothing and counts nothing.
    """
    peak = torch.maximum(lse_a, lse_b)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight_a, weight_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = weight_a + weight_b
    total = torch.where(total == 0, 1.0, total)
    merged = out_a.float() * (weight_a / total)[..., None] + out_b.float() * (weight_b / total)[..., None]
    return merged.to(out_a.dtype)


def _attend_tokens(
    q: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    tokens: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """q[n, hq, d] over the listed tokens of one block table; visible[n, len(tokens)] or None for all."""
    num_rows, num_heads, size = q.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    blocks = table[tokens // block_size].long()
    keys, values = (part[blocks, tokens % block_size].transpose(0, 1)[None] for part in kv_cache)  # [1, hk, L, d]
    folded = q.reshape(num_rows, num_kv_heads, group, size).permute(1, 2, 0, 3).reshape(1, num_kv_heads, -1, size)
    mask = None if visible is None else visible.repeat(group, 1)[None, None]
    out, lse = attend_with_lse(folded, keys, values, scale, mask, softcap)
    out = out.reshape(num_kv_heads, group, num_rows, size).permute(2, 0, 1, 3).reshape(q.shape)
    return out, lse.reshape(num_heads, num_rows).transpose(0, 1)
