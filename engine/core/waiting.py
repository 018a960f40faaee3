"""Those who wait, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferd.engine.config import SchedulingPolicy
from inferd.engine.core.admission import AdmissionGate, PauseState, Refusal, WaitReason
from inferd.engine.core.lora import LoraManager
from inferd.engine.core.policy import make_queue
from inferd.engine.request import Request, RequestStatus

MAX_WITHOUT_SLOT = 128


@dataclass(frozen=True, slots=True)
class Hold:
    """A request that somebody paused by itself."""

    request: Request
    by: str
    at: float  # by the engine's clock


class WaitingRoom:
    """The policy's queue, with a place promised to one of it, and others that are passed by for the moment.

    Those who are held stand beside the queue until they are let go.
    """

    def __init__(
        self, policy: SchedulingPolicy, gates: Sequence[AdmissionGate], lora: LoraManager | None = None
    ) -> None:
        """`gates` are asked in order, `lora` last."""
        self.queue = make_queue(policy)
        self.pause_state = PauseState.RUNNING
        self.head_refusal: Refusal | None = None  # why the next one did not start in the last step
        self.own_refusals: dict[str, Refusal] = {}  # of those that the last step passed by, by request id
        self.held: dict[str, Hold] = {}
        self._lora = lora
        self._gates = [*gates, lora] if lora is not None else gates
        self._promised: Request | None = None
        self._passed: list[Request] = []
        self._num_without_slot = 0  # of those, who wait for their adapters

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests in the queue, those of them that the last step passed by, and those held beside it."""
        return len(self.queue), len(self.own_refusals), len(self.held)

    @property
    def in_order(self) -> list[Request]:
        """Everybody in the queue as they would be admitted, if nobody else came."""
        order = list(self.queue)
        if self._promised is not None and order and (first := self.next()) is not order[0]:
            order.remove(first)
            order.insert(0, first)
        return order

    def add(self, request: Request) -> None:
        """A new request."""
        self.queue.add(request)
        if self._lora is not None:
            self._lora.add(request)

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

    def pass_by(self, request: Request, refusal: Refusal) -> bool:
        """Look at those behind it, until `end_step`; False: no further, since so many wait for their adapters that
        every step would take long to pass them all."""
        self.own_refusals[request.request_id] = refusal
        self._take_out(request)
        self._passed.append(request)
        self._num_without_slot += refusal.reason is WaitReason.ADAPTER_SLOTS
        return self._num_without_slot < MAX_WITHOUT_SLOT

    def begin_step(self) -> None:
        self.own_refusals = {}
        self._num_without_slot = 0

    def end_step(self) -> None:
        """Who was passed by is in his place again."""
        while self._passed:
            self.queue.prepend(self._passed.pop())

    def take(self, request: Request) -> None:
        """It starts to run, and with that the promise to it, or to one that it went before, is done with."""
        self.queue.take(request)
        self._promised = None
        if self._lora is not None:
            self._lora.start(request)

    def give_back(self, request: Request) -> None:
        """It ran, and was preempted."""
        self.queue.prepend(request)
        if self._lora is not None:
            self._lora.stop(request)

    def release(self, request: Request) -> None:
        """It ran, and has ended."""
        self.queue.release(request)
        if self._lora is not None:
            self._lora.stop(request)
            self._lora.remove(request)

    def remove(self, request: Request) -> None:
        """It has ended without running."""
        if self._lora is not None:
            self._lora.remove(request)
        if self.held.pop(request.request_id, None) is not None:
            self.queue.add_back(request)
        self.own_refusals.pop(request.request_id, None)
        self._take_out(request)

    def hold(self, request: Request, by: str, at: float) -> None:
        """Out of the queue until `let_go`; of one that is held already the newer name and time count."""
        if request.request_id not in self.held:
            self._break_promise(request)
            self.own_refusals.pop(request.request_id, None)
            self.queue.set_aside(request)
            if self._lora is not None:
                self._lora.set_aside(request)
        self.held[request.request_id] = Hold(request, by, at)

    def let_go(self, request_id: str) -> bool:
        """In its place again, as near to it as the order allows; False for one that is not held."""
        hold = self.held.pop(request_id, None)
        if hold is not None:
            self.queue.add_back(hold.request)
        return hold is not None

    def set_priority(self, request: Request, priority: int) -> None:
        if request.request_id in self.held:
            request.priority = priority
            return
        self.queue.set_aside(request)
        request.priority = priority
        self.queue.add_back(request)

    def _take_out(self, request: Request) -> None:
        self.queue.remove(request.request_id)
        self._break_promise(request)

    def _break_promise(self, request: Request) -> None:
        if self._promised is request:
            self._promised = None
