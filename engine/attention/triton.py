"""The backend of the Triton kernels: CUDA cards from compute capability 8.0 on.

Rows with one query token go through the paged decode kernel, divided over the card; blocks that several of them share
are attended once for all. Rows with more query tokens go through the prefill kernel over all of their own blocks:
there a tile of queries is tall enough to be bound by arithmetic, and reading a shared block once would save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inferd.engine.attention.base import AttentionBackend, BatchGeometry, StaticGeometry
from inferd.engine.core.kv.spec import EncoderOnlySpec, KVSpec
from inferd.kernels.common.ops import Ops
from inferd.kernels.paged_attention.triton_prefixes import Prefixes

# Below this many tokens that need not be read again, a shared prefix costs more in launches than it saves.
MIN_SAVED_TOKENS = 4096

PAGE_SIZES = (128, 64, 256, 32, 16, 512)
HEAD_SIZES = range(16, 257)


@dataclass(frozen=True)
class _Decode:
    """The first rows of a step, one query token each."""

    block_tables: Tensor  # [n, m] i32
    seq_lens: Tensor  # [n] i32
    max_seq_len: int
    prefixes: Prefixes | None


@dataclass(frozen=True)
class _Prefill:
    """The rows after them."""

    block_tables: Tensor  # [n, m] i32
    query_starts: Tensor  # [n + 1] i32, counted from this part's first token
    seq_lens: Tensor  # [n] i32
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class _Plan:
    decode: _Decode | None
    prefill: _Prefill | None


class TritonMetadata:
    """A step's plan, made with one copy to the device by the first layer that attends, and kept for the others."""

    def __init__(self, geometry: BatchGeometry, min_saved_tokens: int) -> None:
        self._geometry = geometry
        self._min_saved_tokens = min_saved_tokens
        self._plan: _Plan | None = None

    def plan(self, block_size: int) -> _Plan:
        if self._plan is None:
            self._plan = _plan(self._geometry, self._min_saved_tokens, block_size)
        return self._plan


class TritonBackend(AttentionBackend):
    name = "TRITON_ATTN"
    device_types = ("cuda",)

    def __init__(self, ops: Ops, min_saved_tokens: int = MIN_SAVED_TOKENS) -> None:
        """Keys and values are stored by `ops`, whichever they are; attention is always this backend's own kernels."""
        self._min_saved_tokens = min_saved_tokens

    def supports(
        self, spec: KVSpec, device: torch.device, window: int | None, softcap: float | None = None
    ) -> str | None:
        if isinstance(spec, EncoderOnlySpec):
            return "it has no kernels for attention without a KV cache"
        if device.type != "cuda":
            return f"it runs on CUDA cards, not on {device.type}"
        if find_spec("triton") is None:
            return "Triton is not installed"
        if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
        if spec.head_size not in HEAD_SIZES:
            return f"head_size={spec.head_size} is not between {HEAD_SIZES[0]} and {HEAD_SIZES[-1]}"
        if spec.block_size not in PAGE_SIZES:
            return f"block_size={spec.block_size} is not one of {', '.join(map(str, sorted(PAGE_SIZES)))}"
        if softcap is not None:
            return f"its kernels do not cap scores (softcap={softcap:g}) yet"
        return None

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return PAGE_SIZES

    def kv_cache_shape(self, num_blocks: int, spec: KVSpec) -> tuple[int, ...]:
        return (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)

    def build(self, geometry: BatchGeometry) -> TritonMetadata:
        return TritonMetadata(geometry, self._min_saved_tokens)

    def graph_metadata(self, static: StaticGeometry) -> _Plan:
        shared = static.prefixes
        prefixes = None
        if shared is not None:
            prefixes = Prefixes(shared.lens, shared.starts, shared.rows, shared.row_group, shared.max_len)
        return _Plan(_Decode(static.block_tables, static.seq_lens, static.max_seq_len, prefixes), None)

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: TritonMetadata | _Plan,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if softcap is not None:
            raise NotImplementedError("these kernels do not cap scores; `supports` says so")
        kernels = _load_kernels()
        plan = metadata if isinstance(metadata, _Plan) else metadata.plan(kv_cache.shape[2])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        num_decodes = 0
        if (decode := plan.decode) is not None:
            num_decodes = decode.seq_lens.shape[0]
            kernels.decode_into(
                *(out[:num_decodes], lse[:num_decodes], q[:num_decodes], kv_cache),
                *(decode.block_tables, decode.seq_lens, scale, window),
                max_seq_len=decode.max_seq_len,
                prefixes=decode.prefixes if window is None else None,
            )
        if (prefill := plan.prefill) is not None:
            kernels.prefill_into(
                *(out[num_decodes:], lse[num_decodes:], q[num_decodes:], kv_cache),
                *(prefill.block_tables, prefill.query_starts, prefill.seq_lens, scale, window),
                max_query_len=prefill.max_query_len,
                max_seq_len=prefill.max_seq_len,
            )
        return out


def _plan(geometry: BatchGeometry, min_saved_tokens: int, block_size: int) -> _Plan:
    query_lens, seq_lens, tables = geometry.query_lens, geometry.seq_lens, geometry.block_tables
    num_rows = len(query_lens)
    num_decodes = next((row for row, length in enumerate(query_lens) if length > 1), num_rows)
    groups = []
    for num_blocks, members in geometry.shared_prefixes:
        rows = sorted(row for row in members if row < num_decodes)
        if (len(rows) - 1) * num_blocks * block_size >= min_saved_tokens:
            groups.append((num_blocks * block_size, rows))
    starts = [0, *accumulate(query_lens[num_decodes:])]
    packed = (seq_lens, starts, *_lay_out(groups, seq_lens, num_decodes))
    lens_tensor, starts_tensor, *shared = _to_device(packed, tables.device)
    prefixes = None
    if groups:
        lens, group_starts, members_tensor, row_group = shared
        longest = max(length for length, _ in groups)
        prefixes = Prefixes(lens, group_starts, members_tensor, row_group, longest)
    decode = prefill = None
    if num_decodes:
        longest = max(seq_lens[:num_decodes])
        decode = _Decode(tables[:num_decodes], lens_tensor[:num_decodes], longest, prefixes)
    if num_decodes < num_rows:
        longest_query, longest = max(query_lens[num_decodes:]), max(seq_lens[num_decodes:])
        prefill = _Prefill(tables[num_decodes:], starts_tensor, lens_tensor[num_decodes:], longest_query, longest)
    return _Plan(decode, prefill)


def _lay_out(
    groups: Sequence[tuple[int, list[int]]], seq_lens: Sequence[int], num_rows: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """(lens, starts, rows, row_group) of `Prefixes`; raises ValueError for a prefix that a row's query lies in."""
    row_group = [-1] * num_rows
    for index, (length, rows) in enumerate(groups):
        for row in rows:
            if seq_lens[row] <= length:
                raise ValueError(f"row {row} shares {length} tokens that its own query lies in")
            row_group[row] = index
    starts = [0, *accumulate(len(rows) for _, rows in groups)]
    return [length for length, _ in groups], starts, [row for _, rows in groups for row in rows], row_group


def _to_device(parts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Each part as i32, all in one copy."""
    packed = torch.tensor([value for part in parts for value in part], dtype=torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return torch.split(packed, [len(part) for part in parts])


def _load_kernels() -> Any:
    """Imported when first used: Triton need not be there for this file to be."""
    from inferd.kernels.paged_attention import triton as kernels

    return kernels
