"""From the persistent batch and one step's schedule to what the model takes. Pure: reads the rows, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.attention.base import BatchGeometry
from inferd.engine.core.output import SchedulerOutput, SharedPrefix
from inferd.engine.errors import EngineError
from inferd.engine.logprobs import NO_LOGPROBS
from inferd.engine.spec.rejection import NO_DRAFT, DraftChecks
from inferd.engine.upload import upload
from inferd.engine.worker.rows import InputBatch

SharedRows = tuple[int, list[int]]  # number of full blocks, and the step's rows that share them


@dataclass(frozen=True)
class PromptSpan:
    """Tokens of one request's prompt whose log probabilities are wanted."""

    row: int  # in the persistent batch
    first: int  # position of the first of them
    target_ids: NDArray[np.int64]  # [c]
    start: int  # index in the step's tokens of the one before the first; its logits are about the first


@dataclass(frozen=True)
class StepLayout:
    """One step of n scheduled requests and t tokens, in main memory: what an eager pass and a replay are both fed from.

    The step's rows have an order of their own: those with one token first, so that a backend may treat them as a slice.
    """

    query_lens: NDArray[np.int64]  # [n]
    seq_lens: NDArray[np.int64]  # [n]
    token_ids: NDArray[np.int64]  # [t]
    positions: NDArray[np.int64]  # [t]
    slots: tuple[NDArray[np.int64], ...]  # [t] per KV group
    block_tables: tuple[NDArray[np.int32], ...]  # [n, columns in use] per KV group
    shared_prefixes: list[SharedRows]
    logits_indices: NDArray[np.int64]  # [m], tokens whose next token is not known yet
    sampled_rows: NDArray[np.intp]  # [m], the row in the persistent batch of each of them; those of one are together
    prompt_spans: tuple[PromptSpan, ...] = ()
    lora_ids: NDArray[np.int64] | None = None  # [n] adapters, `NO_ADAPTER` for none; None: no row has one
    rows: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))  # [n], in the persistent batch
    checks: DraftChecks | None = None  # None: no row has drafts, and each of the m is of another request

    @property
    def is_decode(self) -> bool:
        """One token a row, and nothing wanted but the next ones."""
        return len(self.token_ids) == len(self.seq_lens) and not self.prompt_spans


@dataclass(frozen=True)
class StepInputs:
    """A step on the device."""

    token_ids: Tensor  # [t] i64
    positions: Tensor  # [t] i64
    geometries: tuple[BatchGeometry, ...]  # one per KV group
    logits_indices: Tensor  # [m] i64


@dataclass(frozen=True)
class _Tokens:
    """How the flat tokens fall into the persistent batch's rows."""

    rows: NDArray[np.intp]  # [n]
    query_lens: NDArray[np.int64]  # [n]
    seq_lens: NDArray[np.int64]  # [n]
    token_rows: NDArray[np.intp]  # [t]
    positions: NDArray[np.int64]  # [t]


def lay_out_step(batch: InputBatch, output: SchedulerOutput) -> StepLayout:
    """Raises EngineError where the schedule and the rows disagree: unknown requests or tokens, missing blocks."""
    tokens = _assign(batch, output.num_scheduled_tokens)
    known, num_drafts = batch.num_tokens[tokens.rows], batch.num_drafts[tokens.rows]
    _check_known(batch, tokens, known + num_drafts)
    caught_up = np.flatnonzero(tokens.seq_lens == known + num_drafts)
    sampled_rows, logits_indices, checks = tokens.rows[caught_up], tokens.query_lens.cumsum()[caught_up] - 1, None
    if num_drafts.any():
        sampled_rows, logits_indices, checks = _behind_drafts(batch, sampled_rows, logits_indices)
    longest = int(tokens.seq_lens.max())
    lora_ids = batch.lora_ids[tokens.rows]
    return StepLayout(
        query_lens=tokens.query_lens,
        seq_lens=tokens.seq_lens,
        token_ids=batch.token_ids[tokens.token_rows, tokens.positions].astype(np.int64),
        positions=tokens.positions,
        slots=tuple(table.slots(tokens.token_rows, tokens.positions) for table in batch.block_tables),
        block_tables=tuple(table.gather(tokens.rows, -(-longest // table.block_size)) for table in batch.block_tables),
        shared_prefixes=_shared_rows(output.shared_prefixes, batch, tokens.rows),
        logits_indices=logits_indices,
        sampled_rows=sampled_rows,
        prompt_spans=_prompt_spans(batch, tokens),
        lora_ids=lora_ids if lora_ids.any() else None,
        rows=tokens.rows,
        checks=checks,
    )


def _behind_drafts(
    batch: InputBatch, rows: NDArray[np.intp], last_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.int64], DraftChecks]:
    """In place of rows[n] and the indices[n] of their last tokens in the step: a row and a token for what each of them
    knows, and one behind each of its drafts, [m]."""
    num_drafts = batch.num_drafts[rows]
    lengths = num_drafts + 1
    starts = lengths.cumsum() - lengths
    nth = np.arange(lengths.sum()) - starts.repeat(lengths)
    last_tokens = (last_tokens - num_drafts).repeat(lengths) + nth
    is_last = nth == num_drafts.repeat(lengths)
    rows = rows.repeat(lengths)
    num_known = batch.num_tokens[rows] + nth
    places = np.where(is_last, 0, num_known)  # behind the last draft there may be no more room
    draft_ids = np.where(is_last, NO_DRAFT, batch.token_ids[rows, places].astype(np.int64))
    return rows, last_tokens, DraftChecks(num_known, draft_ids, starts)


def _prompt_spans(batch: InputBatch, tokens: _Tokens) -> tuple[PromptSpan, ...]:
    wanting = np.flatnonzero(batch.sampling.prompt_logprobs[tokens.rows] != NO_LOGPROBS).tolist()
    spans = []
    for index in wanting:
        row, query_len, seq_len = tokens.rows[index], tokens.query_lens[index], tokens.seq_lens[index]
        computed = seq_len - query_len
        first = max(computed, batch.num_prompt_logprobs[row]) + 1
        end = min(seq_len + 1, batch.num_prompt_tokens[row])
        if first < end:
            start = tokens.query_lens[: index + 1].sum() - query_len + first - 1 - computed
            target_ids = batch.token_ids[row, first:end].astype(np.int64)
            spans.append(PromptSpan(int(row), int(first), target_ids, int(start)))
    return tuple(spans)


def to_inputs(step: StepLayout, device: torch.device) -> StepInputs:
    num_groups = len(step.slots)
    token_ids, positions, logits_indices, *rest = upload(
        (step.token_ids, step.positions, step.logits_indices, *step.slots, *step.block_tables), device
    )
    query_lens, seq_lens = step.query_lens.tolist(), step.seq_lens.tolist()
    geometries = tuple(
        BatchGeometry(query_lens, seq_lens, table, slots, positions, step.shared_prefixes)
        for slots, table in zip(rest[:num_groups], rest[num_groups:], strict=True)
    )
    return StepInputs(token_ids, positions, geometries, logits_indices)


def _assign(batch: InputBatch, num_scheduled_tokens: dict[str, int]) -> _Tokens:
    rows = np.array([batch.row(request_id) for request_id in num_scheduled_tokens], np.intp)
    query_lens = np.array(list(num_scheduled_tokens.values()), np.int64)
    context_lens = batch.num_computed_tokens[rows]
    if query_lens.max(initial=1) == 1:
        return _Tokens(rows, query_lens, context_lens + 1, rows, context_lens)
    order = np.argsort(query_lens > 1, kind="stable")
    rows, query_lens, context_lens = rows[order], query_lens[order], context_lens[order]
    ends = query_lens.cumsum()
    positions = np.arange(ends[-1]) + (context_lens - ends + query_lens).repeat(query_lens)
    return _Tokens(rows, query_lens, context_lens + query_lens, rows.repeat(query_lens), positions)


def _check_known(batch: InputBatch, tokens: _Tokens, known: NDArray[np.int64]) -> None:
    ahead = tokens.seq_lens > known
    if ahead.any():
        at = int(ahead.argmax())
        raise EngineError(
            f"request {batch.request_ids[tokens.rows[at]]!r} was scheduled up to token {tokens.seq_lens[at]}, "
            f"the worker knows {known[at]}"
        )
    for table in batch.block_tables:
        short = table.num_blocks[tokens.rows] * table.block_size < tokens.seq_lens
        if short.any():
            row = tokens.rows[int(short.argmax())]
            raise EngineError(
                f"request {batch.request_ids[row]!r} was scheduled beyond its {table.num_blocks[row]} blocks"
            )


def _shared_rows(prefixes: Sequence[SharedPrefix], batch: InputBatch, rows: NDArray[np.intp]) -> list[SharedRows]:
    """The scheduler's prefixes with the step's rows in place of request ids."""
    if not prefixes:
        return []
    step_rows = {batch.request_ids[row]: index for index, row in enumerate(rows.tolist())}
    for request_id in (request_id for prefix in prefixes for request_id in prefix.request_ids):
        if request_id not in step_rows:
            raise EngineError(f"request {request_id!r} shares a prefix but was not scheduled")
    return [(prefix.num_blocks, sorted(map(step_rows.__getitem__, prefix.request_ids))) for prefix in prefixes]


def dummy_layout(query_lens: Sequence[int], block_sizes: Sequence[int], context: int = 0) -> StepLayout:
    """A step that stores nothing (slots are -1) and reads only block 0: for warming up and for measuring memory.

    Each row has `context` tokens before its queries.
    """
    lens = np.array(query_lens, np.int64)
    positions = np.concatenate([np.arange(length) for length in query_lens]) + context
    widths = (-(-(max(query_lens) + context) // block_size) for block_size in block_sizes)
    return StepLayout(
        query_lens=lens,
        seq_lens=lens + context,
        token_ids=np.zeros_like(positions),
        positions=positions,
        slots=tuple(np.full_like(positions, -1) for _ in block_sizes),
        block_tables=tuple(np.zeros((len(query_lens), width), np.int32) for width in widths),
        shared_prefixes=[],
        logits_indices=lens.cumsum() - 1,
        sampled_rows=np.zeros(0, np.intp),
    )


def empty_layout(num_groups: int) -> StepLayout:
    """A step without rows."""
    none = np.zeros(0, np.int64)
    tables = tuple(np.zeros((0, 0), np.int32) for _ in range(num_groups))
    return StepLayout(none, none, none, none, (none,) * num_groups, tables, [], none, np.zeros(0, np.intp))
