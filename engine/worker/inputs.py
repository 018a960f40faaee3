"""From the persistent batch and one step's schedule to what the model takes. Pure: reads the rows, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.attention.base import BatchGeometry
from inferd.engine.core.output import SchedulerOutput, SharedPrefix
from inferd.engine.errors import EngineError
from inferd.engine.worker.block_table import BlockTable
from inferd.engine.worker.rows import InputBatch


@dataclass(frozen=True)
class StepInputs:
    """One step of n scheduled requests and t tokens.

    The step's rows have an order of their own: those with one token first, so that a backend may treat them as a slice.
    """

    token_ids: Tensor  # [t] i64
    positions: Tensor  # [t] i64
    geometries: tuple[BatchGeometry, ...]  # one per KV group
    logits_indices: Tensor  # [m] i64, tokens whose next token is not known yet
    sampled_rows: NDArray[np.intp]  # [m], the row in the persistent batch of each of them


@dataclass(frozen=True)
class _Layout:
    """How the flat tokens fall into the persistent batch's rows."""

    rows: NDArray[np.intp]  # [n]
    query_lens: NDArray[np.int64]  # [n]
    seq_lens: NDArray[np.int64]  # [n]
    token_rows: NDArray[np.intp]  # [t]
    positions: NDArray[np.int64]  # [t]


def prepare_inputs(batch: InputBatch, output: SchedulerOutput, device: torch.device) -> StepInputs:
    """Raises EngineError where the schedule and the rows disagree: unknown requests or tokens, missing blocks."""
    layout = _lay_out(batch, output.num_scheduled_tokens)
    known = batch.num_tokens[layout.rows]
    _check_known(batch, layout, known)
    caught_up = np.flatnonzero(layout.seq_lens == known)
    positions = torch.from_numpy(layout.positions).to(device)
    shared = _shared_rows(output.shared_prefixes, batch, layout.rows)
    return StepInputs(
        token_ids=torch.from_numpy(batch.token_ids[layout.token_rows, layout.positions].astype(np.int64)).to(device),
        positions=positions,
        geometries=tuple(_geometry(table, layout, positions, shared) for table in batch.block_tables),
        logits_indices=torch.from_numpy(layout.query_lens.cumsum()[caught_up] - 1).to(device),
        sampled_rows=layout.rows[caught_up],
    )


def _lay_out(batch: InputBatch, num_scheduled_tokens: dict[str, int]) -> _Layout:
    rows = np.array([batch.row(request_id) for request_id in num_scheduled_tokens], np.intp)
    query_lens = np.array(list(num_scheduled_tokens.values()), np.int64)
    context_lens = batch.num_computed_tokens[rows]
    if query_lens.max(initial=1) == 1:
        return _Layout(rows, query_lens, context_lens + 1, rows, context_lens)
    order = np.argsort(query_lens > 1, kind="stable")
    rows, query_lens, context_lens = rows[order], query_lens[order], context_lens[order]
    ends = query_lens.cumsum()
    positions = np.arange(ends[-1]) + (context_lens - ends + query_lens).repeat(query_lens)
    return _Layout(rows, query_lens, context_lens + query_lens, rows.repeat(query_lens), positions)


def _check_known(batch: InputBatch, layout: _Layout, known: NDArray[np.int64]) -> None:
    ahead = layout.seq_lens > known
    if ahead.any():
        at = int(ahead.argmax())
        raise EngineError(
            f"request {batch.request_ids[layout.rows[at]]!r} was scheduled up to token {layout.seq_lens[at]}, "
            f"the worker knows {known[at]}"
        )
    for table in batch.block_tables:
        short = table.num_blocks[layout.rows] * table.block_size < layout.seq_lens
        if short.any():
            row = layout.rows[int(short.argmax())]
            raise EngineError(
                f"request {batch.request_ids[row]!r} was scheduled beyond its {table.num_blocks[row]} blocks"
            )


def _geometry(
    table: BlockTable, layout: _Layout, positions: Tensor, shared: list[tuple[int, list[int]]]
) -> BatchGeometry:
    num_columns = -(-int(layout.seq_lens.max()) // table.block_size)
    return BatchGeometry(
        query_lens=layout.query_lens.tolist(),
        seq_lens=layout.seq_lens.tolist(),
        block_tables=torch.from_numpy(table.gather(layout.rows, num_columns)).to(positions.device),
        slots=torch.from_numpy(table.slots(layout.token_rows, layout.positions)).to(positions.device),
        positions=positions,
        shared_prefixes=shared,
    )


def _shared_rows(
    prefixes: Sequence[SharedPrefix], batch: InputBatch, rows: NDArray[np.intp]
) -> list[tuple[int, list[int]]]:
    """The scheduler's prefixes with the step's rows in place of request ids."""
    if not prefixes:
        return []
    step_rows = {batch.request_ids[row]: index for index, row in enumerate(rows.tolist())}
    for request_id in (request_id for prefix in prefixes for request_id in prefix.request_ids):
        if request_id not in step_rows:
            raise EngineError(f"request {request_id!r} shares a prefix but was not scheduled")
    return [(prefix.num_blocks, sorted(map(step_rows.__getitem__, prefix.request_ids))) for prefix in prefixes]


def dummy_inputs(query_lens: list[int], block_sizes: Sequence[int], device: torch.device) -> StepInputs:
    """A step that stores nothing (slots are -1) and reads only block 0: for warming up and for measuring memory."""
    positions = torch.cat([torch.arange(length) for length in query_lens]).to(device)
    slots = torch.full_like(positions, -1)
    widths = (-(-max(query_lens) // block_size) for block_size in block_sizes)
    tables = [torch.zeros(len(query_lens), width, dtype=torch.int32, device=device) for width in widths]
    return StepInputs(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        geometries=tuple(BatchGeometry(query_lens, query_lens, table, slots, positions) for table in tables),
        logits_indices=torch.tensor(query_lens, device=device).cumsum(0) - 1,
        sampled_rows=np.zeros(0, np.intp),
    )
