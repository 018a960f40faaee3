"""A worker's part in speculation: has guesses made after each step for those for whom the scheduler asks."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.core.output import SchedulerOutput
from inferd.engine.spec.base import Drafter, DraftRow
from inferd.engine.worker.rows import InputBatch


@dataclass(frozen=True)
class _Asked:
    request_id: str
    num_wanted: int
    num_tokens: int | None  # of its prompt, once the step has run; None: it gets its next tokens in the step


class Drafting:
    """`begin` and `finish` alternate, around each step."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._asked: list[_Asked] = []

    def begin(self, output: SchedulerOutput, batch: InputBatch) -> None:
        """`batch` has followed the step's differences and has its drafts."""
        self._drafter.follow(output)
        self._asked = [
            self._ask(batch, request_id, num_wanted, output.num_scheduled_tokens[request_id])
            for request_id, num_wanted in output.num_drafts_wanted.items()
        ]

    def finish(self, batch: InputBatch) -> dict[str, list[int]]:
        """`batch` has the step's tokens. Guesses by request id."""
        return self._drafter.propose([self._row(batch, asked) for asked in self._asked]) if self._asked else {}

    @staticmethod
    def _ask(batch: InputBatch, request_id: str, num_wanted: int, num_scheduled: int) -> _Asked:
        row = batch.row(request_id)
        end = int(batch.num_computed_tokens[row]) + num_scheduled
        is_chunk = end < batch.num_tokens[row]
        return _Asked(request_id, 0 if is_chunk else num_wanted, end if is_chunk else None)

    @staticmethod
    def _row(batch: InputBatch, asked: _Asked) -> DraftRow:
        row = batch.row(asked.request_id)
        num_tokens = batch.num_tokens[row] if asked.num_tokens is None else asked.num_tokens
        table = batch.block_tables[0]
        block_ids = table.ids[row, : table.num_blocks[row]]
        return DraftRow(asked.request_id, batch.token_ids[row, :num_tokens], block_ids, asked.num_wanted)
