"""The backend of `Ops` and plain torch: every device, every head size; the CPU's path.

Rows with one query token go through `paged_decode` in one call, rows with more through `paged_prefill` in another.
Blocks that several rows share are attended once for all their queries, and merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from inferd.engine.attention.base import AttentionBackend, BatchGeometry
from inferd.engine.attention.whole import WholeRows, attend_whole
from inferd.engine.core.kv.spec import KVSpec
from inferd.kernels.common.ops import Ops

# Below this many tokens that need not be read again, a shared prefix costs more in calls than it saves.
MIN_SAVED_TOKENS = 512

Selection = slice | Tensor  # of a step's tokens: a slice costs no copy
_Scores = tuple[float, int | None, float | None]  # scale, window, softcap


@dataclass(frozen=True)
class _Rows:
    """Rows that one call serves."""

    tokens: Selection
    block_tables: Tensor  # [n, m] i32
    query_starts: Tensor  # [n + 1] i32
    seq_lens: Tensor  # [n] i32


@dataclass(frozen=True)
class _Prefix:
    """Blocks that lie before all of the selected tokens."""

    tokens: Selection
    block_ids: Tensor  # [b] i32


@dataclass(frozen=True)
class _Plan:
    """How a step's tokens are attended; each token is in one of `decode` and `prefill`, and in at most one prefix."""

    decode: _Rows | None
    prefill: _Rows | None
    prefixes: tuple[_Prefix, ...] = ()


class TorchMetadata:
    """The step's plans, each made by the first layer that needs it and kept for the others."""

    def __init__(self, geometry: BatchGeometry, min_saved_tokens: int) -> None:
        self._geometry = geometry
        self._min_saved_tokens = min_saved_tokens
        self._plain: _Plan | None = None
        self._shared: _Plan | None = None

    @property
    def plain(self) -> _Plan:
        """Every row over all of its blocks."""
        if self._plain is None:
            self._plain = _plan(self._geometry, self._geometry.block_tables, self._geometry.seq_lens)
        return self._plain

    def shared(self, block_size: int) -> _Plan:
        """Shared prefixes apart, where that pays; `plain` when it pays nowhere."""
        if self._shared is None:
            worthwhile = [
                (num_blocks, rows)
                for num_blocks, rows in self._geometry.shared_prefixes
                if (len(rows) - 1) * num_blocks * block_size >= self._min_saved_tokens
            ]
            self._shared = _plan_shared(self._geometry, worthwhile, block_size) if worthwhile else self.plain
        return self._shared


class TorchBackend(AttentionBackend):
    name = "torch"

    def __init__(self, ops: Ops, min_saved_tokens: int = MIN_SAVED_TOKENS) -> None:
        self._ops = ops
        self._min_saved_tokens = min_saved_tokens

    def supports(
        self, spec: KVSpec, device: torch.device, window: int | None, softcap: float | None = None
    ) -> str | None:
        return None

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return ()

    def kv_cache_shape(self, num_blocks: int, spec: KVSpec) -> tuple[int, ...]:
        return (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)

    def build(self, geometry: BatchGeometry) -> TorchMetadata:
        return TorchMetadata(geometry, self._min_saved_tokens)

    def build_whole(self, row_lens: Sequence[int], device: torch.device) -> WholeRows:
        return WholeRows.of(row_lens, device)

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, metadata: WholeRows, scale: float) -> Tensor:
        return attend_whole(q, k, v, metadata, scale)

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: TorchMetadata,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        plan = metadata.plain if window is not None else metadata.shared(kv_cache.shape[2])
        out, lse = self._attend_rows(plan, q, kv_cache, (scale, window, softcap))
        for prefix in plan.prefixes:
            tokens = prefix.tokens
            prefix_out, prefix_lse = self._ops.prefix_attend(q[tokens], kv_cache, prefix.block_ids, scale, softcap)
            out[tokens] = self._ops.merge_lse(out[tokens], lse[tokens], prefix_out, prefix_lse)
        return out

    def _attend_rows(self, plan: _Plan, q: Tensor, kv_cache: Tensor, scores: _Scores) -> tuple[Tensor, Tensor]:
        decode, prefill = plan.decode, plan.prefill
        if prefill is None and decode is not None:
            return self._ops.paged_decode(q, kv_cache, decode.block_tables, decode.seq_lens, *scores)
        if decode is None and prefill is not None:
            return self._prefill(prefill, q, kv_cache, scores)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if decode is not None and prefill is not None:
            tokens = decode.tokens
            out[tokens], lse[tokens] = self._ops.paged_decode(
                q[tokens], kv_cache, decode.block_tables, decode.seq_lens, *scores
            )
            tokens = prefill.tokens
            out[tokens], lse[tokens] = self._prefill(prefill, q[tokens], kv_cache, scores)
        return out, lse

    def _prefill(self, rows: _Rows, q: Tensor, kv_cache: Tensor, scores: _Scores) -> tuple[Tensor, Tensor]:
        return self._ops.paged_prefill(q, kv_cache, rows.block_tables, rows.query_starts, rows.seq_lens, *scores)


def _plan(geometry: BatchGeometry, block_tables: Tensor, seq_lens: Sequence[int]) -> _Plan:
    lens = geometry.query_lens
    single = [row for row, length in enumerate(lens) if length == 1]
    several = [row for row, length in enumerate(lens) if length > 1]
    device = block_tables.device
    lens_tensor = torch.tensor(seq_lens, dtype=torch.int32, device=device)

    def rows_of(rows: list[int]) -> _Rows | None:
        if not rows:
            return None
        starts = torch.tensor([0, *(lens[row] for row in rows)], dtype=torch.int32, device=device)
        starts = starts.cumsum(0, dtype=torch.int32)
        chosen = _select(rows, device)
        return _Rows(_select_tokens(lens, rows, device), block_tables[chosen], starts, lens_tensor[chosen])

    return _Plan(rows_of(single), rows_of(several))


def _plan_shared(geometry: BatchGeometry, prefixes: list[tuple[int, list[int]]], block_size: int) -> _Plan:
    """Tables and lengths of the rows that share begin after what they share."""
    tables, seq_lens = geometry.block_tables.clone(), list(geometry.seq_lens)
    device = tables.device
    parts = []
    for num_blocks, unordered in prefixes:
        rows = sorted(unordered)
        for row in rows:
            seq_lens[row] -= num_blocks * block_size
            if seq_lens[row] < geometry.query_lens[row]:
                raise ValueError(f"row {row} shares {num_blocks} blocks that its own queries reach into")
        chosen = _select(rows, device)
        tables[chosen, : tables.shape[1] - num_blocks] = geometry.block_tables[chosen, num_blocks:]
        tokens = _select_tokens(geometry.query_lens, rows, device)
        parts.append(_Prefix(tokens, geometry.block_tables[rows[0], :num_blocks].contiguous()))
    plan = _plan(geometry, tables, seq_lens)
    return _Plan(plan.decode, plan.prefill, tuple(parts))


def _select(indices: list[int], device: torch.device) -> Selection:
    """Ascending indices, as a slice when nothing is left out between them."""
    if indices[-1] - indices[0] + 1 == len(indices):
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices, device=device)


def _select_tokens(query_lens: Sequence[int], rows: list[int], device: torch.device) -> Selection:
    ends = list(accumulate(query_lens))
    if isinstance(_select(rows, device), slice):
        return slice(ends[rows[0]] - query_lens[rows[0]], ends[rows[-1]])
    tokens = [token for row in rows for token in range(ends[row] - query_lens[row], ends[row])]
    return torch.tensor(tokens, device=device)
