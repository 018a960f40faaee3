"""A scheduler at one moment: where everybody stands, and why those who stand still do."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from inferd.engine.config import SchedulerConfig
from inferd.engine.core.admission import PauseState, Refusal, WaitReason
from inferd.engine.core.fair import LANE_WEIGHTS
from inferd.engine.core.insight import reasons
from inferd.engine.core.insight.reasons import Ahead, Why
from inferd.engine.core.insight.relief import find_relief
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.output import SchedulerOutput
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.insight.records import Reason, RequestState
from inferd.engine.messages import FinishReason
from inferd.engine.request import Request, RequestStatus

_ENDS = {FinishReason.ABORT: RequestState.CANCELLED, FinishReason.ERROR: RequestState.FAILED}


Place = tuple[Ahead, float, int]


class Scene:
    """Made anew for every look; what it says is good for that moment."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        config: SchedulerConfig,
        *,
        last_step: SchedulerOutput | None,
        standstill: Why | None,
        now: float,
    ) -> None:
        """`last_step` is the newest that computes anything; `standstill` says why the engine as a whole is halted."""
        self._scheduler = scheduler
        self._kv = kv
        self._config = config
        self._waiting = scheduler.waiting
        self._standstill = standstill
        self._halts_all = self._waiting.pause_state is PauseState.NOTHING
        self._now = now
        self.last_step = last_step
        passed_by = self._waiting.own_refusals
        order = [request for request in self._waiting.in_order if request.request_id not in passed_by]
        self.positions = {request.request_id: place for place, request in enumerate(order, 1)}
        self._ahead = count_ahead(order)
        self._lane_parts = sum(LANE_WEIGHTS[lane] for lane in {request.lane for request in order})

    @property
    def is_halted(self) -> bool:
        """Whether the engine as a whole is."""
        return self._halts_all and self._standstill is not None

    def state(self, request: Request) -> RequestState:
        status = request.status
        if status is RequestStatus.FINISHED:
            assert request.finish_reason is not None
            return _ENDS.get(request.finish_reason, RequestState.FINISHED)
        if request.request_id in self._waiting.held or (self.is_halted and self._is_paused_by_somebody):
            return RequestState.PAUSED
        if status is RequestStatus.RUNNING:
            return RequestState.DECODE if is_decoding(request) else RequestState.PREFILL
        return RequestState.WAITING if status is RequestStatus.WAITING else RequestState.PREEMPTED

    def why(self, request: Request) -> Why | None:
        """Why it does not go on; None when it does, or has ended."""
        if request.is_finished:
            return None
        hold = self._waiting.held.get(request.request_id)
        if hold is not None:
            return reasons.paused_by(hold.by, self._now - hold.at)
        if self.is_halted:
            return self._standstill
        if request.status is RequestStatus.RUNNING:
            return self._why_left_out(request)
        return self._why_waiting(request)

    def place(self, request: Request) -> Place | None:
        """All that a request's record depends on that waits for nothing but its turn; None for every other one."""
        if request.status is not RequestStatus.WAITING or self.is_halted:
            return None
        ahead = self._ahead.get(request.request_id)
        if ahead is None or not ahead.num_all:
            return None
        return ahead, self._lane_parts, request.priority

    def batch_size(self, request: Request) -> int:
        """Requests in the last step, if this one was among them."""
        scheduled = self.last_step.num_scheduled_tokens if self.last_step is not None else {}
        return len(scheduled) if self._was_in_last_step(request) else 0

    @property
    def _is_paused_by_somebody(self) -> bool:
        return self._standstill is not None and self._standstill.reason is Reason.PAUSED_BY

    def _was_in_last_step(self, request: Request) -> bool:
        step = self.last_step
        return (
            step is not None and request.added_at_step < step.step and request.request_id in step.num_scheduled_tokens
        )

    def _why_left_out(self, request: Request) -> Why | None:
        """A running request goes on unless a full step had nothing left for it."""
        step = self.last_step
        if step is None or self._was_in_last_step(request) or request.num_output_placeholders:
            return None
        return self._budget_taken(step)

    def _why_waiting(self, request: Request) -> Why:
        own = self._waiting.own_refusals.get(request.request_id)
        if own is not None:
            return self._why_passed_by(request, own)
        ahead = self._ahead[request.request_id]
        if request.status is RequestStatus.PREEMPTED:
            winner = self._scheduler.requests.get(request.preempted_for or "")
            eta_s = None if ahead.num_all else self._why_next_waits(request).eta_s
            return replace(reasons.preempted(request, winner), eta_s=eta_s)
        if not ahead.num_all:
            return self._why_next_waits(request)
        if self._config.policy == "fair" and (ahead.num_other_lanes or ahead.num_other_clients):
            return reasons.lane_share(request, ahead, LANE_WEIGHTS[request.lane], self._lane_parts)
        return reasons.queue_order(ahead)

    def _why_passed_by(self, request: Request, refusal: Refusal) -> Why:
        if refusal.reason is WaitReason.PAUSED and self._standstill is not None:
            return self._standstill
        if refusal.reason is WaitReason.GRAMMAR_COMPILING and request.structured_output is not None:
            kind = request.structured_output.kind.value.replace("_", " ")
            return reasons.grammar_compiling(kind, self._now - request.life.queued_at)
        if refusal.reason is WaitReason.ADAPTER_SLOTS and request.lora is not None:
            return reasons.adapter_slots(request.lora.name, refusal.available)
        return reasons.queue_order(Ahead(0))  # it will be told soon, or the next step sees that it may go on

    def _why_next_waits(self, request: Request) -> Why:
        """What the last step refused to the first of the queue; nothing yet to one that came since."""
        refusal = self._waiting.head_refusal
        if refusal is None or request.added_at_step >= self._scheduler.ledger.step:
            return reasons.queue_order(Ahead(0))
        running = self._scheduler.running
        match refusal.reason:
            case WaitReason.KV_FULL:
                missing = refusal.needed - refusal.available
                relief = find_relief(running, missing, lambda r: self._kv.num_blocks_of_its_own(r.request_id))
                return reasons.kv_full(refusal.needed, refusal.available, relief)
            case WaitReason.SEQ_LIMIT:
                return reasons.seq_limit(len(running), refusal.available, find_relief(running, 1, lambda r: 1))
            case WaitReason.TOKEN_BUDGET if refusal.needed > 1:
                return reasons.too_long_for_the_rest(refusal.needed, refusal.available)
            case WaitReason.TOKEN_BUDGET if self.last_step is not None:
                return self._budget_taken(self.last_step) or reasons.queue_order(Ahead(0))
            case WaitReason.PREEMPTION if (victim := self._last_victim()) is not None:
                return reasons.blocks_given_up(victim)
        return reasons.queue_order(Ahead(0))

    def _budget_taken(self, step: SchedulerOutput) -> Why | None:
        if step.total_num_scheduled_tokens < self._config.max_num_batched_tokens:
            return None
        return reasons.token_budget(step.total_num_scheduled_tokens, len(step.num_scheduled_tokens))

    def _last_victim(self) -> Request | None:
        """Who was preempted last, and still waits."""
        preempted = [request for request in self._waiting.queue if request.status is RequestStatus.PREEMPTED]
        return max(preempted, key=lambda request: request.life.preempted_at, default=None)


def is_decoding(request: Request) -> bool:
    """Whether all that is known of a running request has been computed but its newest token."""
    if request.num_output_placeholders:
        return True
    return request.num_output_tokens > 0 and request.num_computed_tokens >= request.num_tokens - 1


def count_ahead(order: Sequence[Request]) -> dict[str, Ahead]:
    """For each of a queue: who is before it, and who of them although he came later."""
    counts: dict[str, Ahead] = {}
    everybody: list[int] = []  # arrival numbers of those before, sorted; likewise the next two
    lanes: defaultdict[str, list[int]] = defaultdict(list)
    clients: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for request in order:
        lane, client = lanes[request.lane], clients[request.lane, request.client]
        later, of_lane, of_client = (_later(numbers, request.number) for numbers in (everybody, lane, client))
        counts[request.request_id] = Ahead(len(everybody), of_client, later - of_lane, of_lane - of_client)
        for numbers in (everybody, lane, client):
            insort(numbers, request.number)
    return counts


def _later(numbers: list[int], number: int) -> int:
    return len(numbers) - bisect_right(numbers, number)
