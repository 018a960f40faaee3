"""The persistent batch: every request that the worker knows, one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inferd.engine.core.output import KnownRequests, NewRequest
from inferd.engine.errors import EngineError
from inferd.engine.sampling.batch import SamplingBatch, SamplingColumns
from inferd.engine.sampling.chain import ProcessorChain
from inferd.engine.sampling.processors import AddedRow, BatchUpdate, StepRows
from inferd.engine.worker.block_table import BlockTable

_FIRST_TOKEN_COLUMNS = 1024  # the token buffer starts this wide and doubles: most contexts stay far below their limit


class InputBatch:
    """Per-request arrays, filled from the scheduler's differences.

    A removed row leaves a hole that the next added request fills; `condense` closes the holes that are left, so that
    rows [0, len(batch)) are in use. A request that is alive but not scheduled keeps its row. The worker appends the
    tokens that it samples, so they never travel back.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        processors: ProcessorChain | None = None,
    ) -> None:
        """`processors` hear of every change of rows; without any, logits are sampled as the model computed them."""
        self.max_model_len = max_model_len
        self.token_ids = np.zeros((max_num_seqs, min(max_model_len, _FIRST_TOKEN_COLUMNS)), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)  # known ones: prompt and sampled
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.request_ids = np.empty(max_num_seqs, object)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, np.int64)  # of tokens 1 to here: they are known already
        self.lora_ids = np.zeros(max_num_seqs, np.int64)  # `NO_ADAPTER` where there is none
        self.num_drafts = np.zeros(max_num_seqs, np.int64)  # that this step checks; they lie behind the known tokens
        self.sampling = SamplingColumns(max_num_seqs)
        self.block_tables = tuple(BlockTable(max_num_seqs, max_model_len, size) for size in block_sizes)
        self._processors = processors
        self._changes = BatchUpdate()  # that the processors have not heard of
        self._rows: dict[str, int] = {}
        self._holes: list[int] = []  # unused rows below `_end`
        self._end = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def row(self, request_id: str) -> int:
        """Raises EngineError for an id that was never added, or removed since."""
        try:
            return self._rows[request_id]
        except KeyError:
            raise EngineError(f"the worker was asked to run request {request_id!r}, which it does not hold") from None

    def add(self, new: NewRequest) -> int:
        if new.request_id in self._rows:
            raise EngineError(f"request {new.request_id!r} was sent to the worker as new, but it holds it already")
        num_tokens = len(new.token_ids)
        self._reserve_tokens(num_tokens)
        row = self._take_row()
        self._rows[new.request_id] = row
        self.request_ids[row] = new.request_id
        self.token_ids[row, :num_tokens] = new.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_prompt_logprobs[row] = new.num_prompt_logprobs
        self.lora_ids[row] = new.lora_id
        self.sampling.set(row, new.params, new.seed)
        self._changes.added.append(AddedRow(row, new.request_id, new.params, new.token_ids[: new.num_prompt_tokens]))
        for table, block_ids in zip(self.block_tables, new.block_ids, strict=True):
            table.set(row, block_ids)
        return row

    def remove(self, request_id: str) -> None:
        """Unknown ids are ignored: a request may end before the worker has heard of it."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._holes.append(row)
            self._changes.removed.append(row)

    def update(self, known: KnownRequests) -> None:
        for request_id, block_ids, num_computed in zip(
            known.request_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            row = self.row(request_id)
            self.num_computed_tokens[row] = num_computed
            if block_ids is not None:
                for table, ids in zip(self.block_tables, block_ids, strict=True):
                    table.append(row, ids)

    def condense(self) -> None:
        """Move the last rows into the holes that are left. Ends the changes of a step."""
        holes = set(self._holes)
        for hole in sorted(holes):
            while self._end - 1 in holes:
                self._end -= 1
            if hole >= self._end:
                break
            self._end -= 1
            self._move(self._end, hole)
            holes.discard(hole)
        self._holes.clear()
        changes, self._changes = self._changes, BatchUpdate()
        if self._processors is not None:
            self._processors.update_state(changes)

    def place_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Those that the step checks, by request id. After `condense`."""
        self.num_drafts.fill(0)
        for request_id, token_ids in drafts.items():
            row = self.row(request_id)
            start = self.num_tokens[row]
            self._reserve_tokens(int(start) + len(token_ids))
            self.token_ids[row, start : start + len(token_ids)] = token_ids
            self.num_drafts[row] = len(token_ids)

    def append_tokens(
        self, rows: NDArray[np.intp], token_ids: NDArray[np.int64], counts: NDArray[np.int64] | int = 1
    ) -> None:
        """So many tokens to each of `rows`: the first of its drafts, and `token_ids` last."""
        lengths = self.num_tokens[rows] + counts
        self._reserve_tokens(int(lengths.max(initial=0)))
        self.token_ids[rows, lengths - 1] = token_ids
        self.num_tokens[rows] = lengths

    def sampling_batch(
        self, rows: NDArray[np.intp], device: torch.device, num_known: NDArray[np.int64] | None = None
    ) -> SamplingBatch:
        """`num_known[m]`: tokens that each of `rows[m]` knows, where these are not just those of its request."""
        num_tokens = self.num_tokens[rows] if num_known is None else num_known
        edits = None
        if self._processors is not None:
            edits = self._processors.edits(StepRows(rows, self.token_ids, num_tokens, self.num_prompt_tokens))
        return self.sampling.select(rows, self.request_ids[rows].tolist(), num_tokens, device, edits)

    @property
    def _arrays(self) -> list[NDArray[Any]]:
        """Everything that belongs to a row, and so moves with it."""
        return [
            self.token_ids,
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_computed_tokens,
            self.num_prompt_logprobs,
            self.lora_ids,
            self.request_ids,
            *self.sampling.arrays,
            *(array for table in self.block_tables for array in table.arrays),
        ]

    def _move(self, source: int, target: int) -> None:
        for array in self._arrays:
            array[target] = array[source]
        self._changes.moved.append((source, target))
        self._rows[self.request_ids[target]] = target

    def _take_row(self) -> int:
        if self._holes:
            return self._holes.pop()
        if self._end == len(self.num_tokens):
            raise EngineError(f"the worker was sent more requests than max_num_seqs={len(self.num_tokens)}")
        self._end += 1
        return self._end - 1

    def _reserve_tokens(self, num_tokens: int) -> None:
        if num_tokens > self.max_model_len:
            raise EngineError(f"a request reached {num_tokens} tokens, above max_model_len={self.max_model_len}")
        num_rows, width = self.token_ids.shape
        if num_tokens > width:
            grown = np.zeros((num_rows, min(self.max_model_len, max(num_tokens, 2 * width))), np.int32)
            grown[:, :width] = self.token_ids
            self.token_ids = grown
