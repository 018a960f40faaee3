"""A smaller model over the same vocabulary says what may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.core.output import SchedulerOutput
from inferd.engine.spec.base import DraftRow
from inferd.engine.spec.coverage import Coverage
from inferd.engine.spec.passes import Piece, cut_into_passes, lay_out_pass
from inferd.engine.worker.forward import Forward


@dataclass(frozen=True)
class DraftLimits:
    vocab_size: int  # of the model that checks: the draft model may know more ids, or fewer
    draft_vocab_size: int
    max_positions: int  # of the draft model
    max_pass_tokens: int


@dataclass
class _Attempt:
    """One request's draft while it is made."""

    row: DraftRow
    start: int  # tokens before it are stored already
    end: int  # tokens that the draft model sees
    num_wanted: int
    drafts: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return len(self.drafts) < self.num_wanted


@dataclass(frozen=True)
class _Stored:
    """What the draft model stored of a request in its last attempt: its tokens up to `end`, then these drafts."""

    end: int
    drafts: list[int]


class DraftModel:
    """Implements `Drafter`. Each guess is the likeliest token, all rows at once.

    Its keys and values lie in pages beside those of the model, in the same blocks at the same slots, so whatever the
    scheduler decides about blocks holds for both: hits, preemption, release. A draft that is refused leaves keys and
    values behind, over which the next attempt writes; those of drafts that stood are kept. What is missing of a
    request, because it was not drafted for in a while or because it hit blocks of one that was not, is computed when it
    is drafted for again. While a prompt is computed in chunks, the draft model goes along.
    """

    def __init__(
        self,
        forward: Forward,
        greedy: Callable[[Tensor], Tensor],
        num_blocks: int,
        block_size: int,
        limits: DraftLimits,
    ) -> None:
        """`forward` has one KV group. `greedy`: as `kernels.select.build_greedy` gives it."""
        self._forward = forward
        self._greedy = greedy
        self._block_size = block_size
        self._limits = limits
        self._coverage = Coverage(num_blocks, block_size)
        self._stored: dict[str, _Stored] = {}

    def follow(self, output: SchedulerOutput) -> None:
        for request_id in (*output.finished_ids, *output.preempted_ids):
            self._stored.pop(request_id, None)
        for new in output.new:
            self._coverage.reset(new.block_ids[0][new.num_computed_tokens // self._block_size :])
        for block_ids in output.known.new_block_ids:
            if block_ids is not None:
                self._coverage.reset(block_ids[0])

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> dict[str, list[int]]:
        """The first pass brings each request up to its newest token, each further one adds a guess."""
        attempts = [attempt for row in rows if (attempt := self._begin(row)) is not None]
        pieces = [self._catch_up(index, attempt) for index, attempt in enumerate(attempts)]
        while pieces:
            for batch in cut_into_passes(pieces, self._limits.max_pass_tokens):
                self._run(batch, attempts)
            pieces = [self._next_guess(index, attempt) for index, attempt in enumerate(attempts) if attempt.is_open]
        for attempt in attempts:
            self._stored[attempt.row.request_id] = _Stored(attempt.end, attempt.drafts[:-1])
        return {attempt.row.request_id: attempt.drafts for attempt in attempts if attempt.drafts}

    def _begin(self, row: DraftRow) -> _Attempt | None:
        """As far as its blocks and the draft model's positions reach; None when there is nothing to compute."""
        num_tokens = len(row.token_ids)
        room = min(len(row.block_ids) * self._block_size, self._limits.max_positions)
        end = min(num_tokens, room)
        start = self._num_stored(row)
        if row.num_wanted:  # the last one's logits
            start = min(start, num_tokens - 1)
        if end <= start:
            return None
        self._coverage.store(row.block_ids, end)
        num_wanted = min(row.num_wanted, room - num_tokens + 1)  # the last guess is not fed back
        return _Attempt(row, start, end, max(num_wanted, 0))

    def _num_stored(self, row: DraftRow) -> int:
        last = self._stored.get(row.request_id)
        if last is None:
            return self._coverage.num_covered(row.block_ids)
        since = row.token_ids[last.end : last.end + len(last.drafts)].tolist()
        stood = 0
        while stood < len(since) and since[stood] == last.drafts[stood]:
            stood += 1
        return last.end + stood

    def _catch_up(self, index: int, attempt: _Attempt) -> Piece:
        token_ids = attempt.row.token_ids[attempt.start : attempt.end].astype(np.int64)
        return self._piece(index, attempt, token_ids, attempt.start, wants_next=attempt.is_open)

    def _next_guess(self, index: int, attempt: _Attempt) -> Piece:
        newest = np.array(attempt.drafts[-1:], np.int64)
        return self._piece(index, attempt, newest, attempt.end + len(attempt.drafts) - 1, wants_next=True)

    def _piece(
        self, index: int, attempt: _Attempt, token_ids: NDArray[np.int64], start: int, *, wants_next: bool
    ) -> Piece:
        """An id that the draft model does not know is read as another: it costs a good guess, no more."""
        known = np.where(token_ids < self._limits.draft_vocab_size, token_ids, 0)
        return Piece(index, known, start, attempt.row.block_ids, wants_next)

    def _run(self, batch: Sequence[Piece], attempts: Sequence[_Attempt]) -> None:
        layout, wanting = lay_out_pass(batch, self._block_size)
        result = self._forward.run(layout)
        if result is None:
            return
        ids = self._greedy(result.logits.float()) if result.greedy_ids is None else result.greedy_ids
        for index, token_id in zip(wanting, ids.tolist(), strict=True):
            attempt = attempts[index]
            if 0 <= token_id < self._limits.vocab_size:
                attempt.drafts.append(token_id)
            else:  # nothing that the model could have said
                attempt.num_wanted = len(attempt.drafts)
