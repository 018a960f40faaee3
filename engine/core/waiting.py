"""Those who wait, and why."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.config import SchedulingPolicy
from inferd.engine.core.admission import AdmissionGate, PauseState, Refusal, WaitReason
from inferd.engine.core.policy import make_queue
from inferd.engine.request import Request, RequestStatus


class WaitingRoom:
    """The policy's queue, with a place promised to one of it, and others that are passed by for the moment."""

    def __init__(self, policy: SchedulingPolicy, gates: Sequence[AdmissionGate]) -> None:
        self.queue = make_queue(policy)
        self.pause_state = PauseState.RUNNING
        self.head_refusal: Refusal | None = None  # why the next one did not start in the last step
        self.own_refusals: dict[str, Refusal] = {}  # of those that the last step passed by, by request id
        self._gates = gates
        self._promised: Request | None = None
        self._passed: list[Request] = []

    def next(self) -> Request:
        """The queue's first, unless others made way for one that is no worse: they did it for nobody else."""
        first, promised = self.queue.peek(), self._promised
        if promised is None or self.queue.standing(first)[0] < self.queue.standing(promised)[0]:
            return first
        return promised

    def promise(self, request: Request) -> None:
        """Running requests are being preempted so that this one can start."""
        self._promised = request

    def own_refusal(self, request: Request) -> Refusal | None:
        """What this request alone waits for."""
        if self.pause_state is PauseState.NO_NEW and request.status is RequestStatus.WAITING:
            return Refusal(WaitReason.PAUSED)
        return next(filter(None, (gate.refusal(request) for gate in self._gates)), None)

    def pass_by(self, request: Request, refusal: Refusal) -> None:
        """Look at those behind it, until `end_step`."""
        self.own_refusals[request.request_id] = refusal
        self.remove(request)
        self._passed.append(request)

    def begin_step(self) -> None:
        self.own_refusals = {}

    def end_step(self) -> None:
        """Who was passed by is in his place again."""
        while self._passed:
            self.queue.prepend(self._passed.pop())

    def take(self, request: Request) -> None:
        """It starts to run, and with that the promise to it, or to one that it went before, is done with."""
        self.queue.take(request)
        self._promised = None

    def remove(self, request: Request) -> None:
        self.queue.remove(request.request_id)
        if self._promised is request:
            self._promised = None
