"""Where waiting requests become running ones."""

from __future__ import annotations

from bisect import insort_right

from inferd.engine.config import SchedulerConfig
from inferd.engine.core.admission import Refusal
from inferd.engine.core.batch import StepBatch
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.ledger import Ledger
from inferd.engine.core.room import admit
from inferd.engine.core.waiting import WaitingRoom
from inferd.engine.request import Request


class Entrance:
    """Lets those in for whom a step has tokens, a place and blocks. `running` is the scheduler's own list."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        waiting: WaitingRoom,
        running: list[Request],
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._queue = waiting.queue
        self._running = running
        self._ledger = ledger

    def admit_waiting(self, batch: StepBatch) -> None:
        """In strict order: the first that does not fit holds up those behind it, or long prompts would starve.

        Only who waits for something of his own is passed by.
        """
        waiting = self._waiting
        waiting.begin_step()
        waiting.head_refusal = self._step_refusal(batch)
        while waiting.head_refusal is None and self._queue:
            request = waiting.next()
            refusal = waiting.own_refusal(request)
            if refusal is None:
                waiting.head_refusal = self._admit(request, batch) or self._step_refusal(batch)
            elif not waiting.pass_by(request, refusal):
                waiting.head_refusal = refusal
        waiting.end_step()

    def _step_refusal(self, batch: StepBatch) -> Refusal | None:
        """What the step has no more of, for anybody."""
        return batch.refusal(len(self._running), self._config.max_num_seqs) if self._queue else None

    def _admit(self, request: Request, batch: StepBatch) -> Refusal | None:
        refusal = admit(request, batch, self._kv, self._ledger, self._waiting)
        if refusal is None:
            insort_right(self._running, request, key=self._queue.standing)
        return refusal
