"""Who computes how many tokens in the next step.

There is no prefill and no decode. Each request has `num_computed_tokens` chasing `num_tokens`, a step has one token
budget, and a request that is behind takes from it what it can: running requests first, then waiting ones.

A step may be scheduled before the results of those before it are known. What they will sample is counted as
placeholders; a request that turns out to have ended has one token computed in vain, which is dropped.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from inferd.engine.config import SchedulerConfig
from inferd.engine.core.admission import AdmissionGate, PauseState
from inferd.engine.core.batch import StepBatch, num_tokens_behind
from inferd.engine.core.clock import Clock, steady_time
from inferd.engine.core.entrance import Entrance
from inferd.engine.core.grammar import GrammarManager
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.ledger import Ledger
from inferd.engine.core.lora import LoraManager
from inferd.engine.core.output import BlockIds, ModelRunnerOutput, SchedulerOutput
from inferd.engine.core.report import output_of, with_vectors
from inferd.engine.core.room import allocate_for_drafts, those_who_yield
from inferd.engine.core.speculation import NoSpeculation, Speculation
from inferd.engine.core.stops import Stop, append_tokens
from inferd.engine.core.waiting import WaitingRoom
from inferd.engine.errors import InvalidRequest
from inferd.engine.messages import EngineOutput, FinishReason, SchedulerStats
from inferd.engine.request import Request, RequestStatus

T = TypeVar("T")


class Scheduler:
    """Owns every unfinished request and, through its `KVCacheManager`, every block. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        eos_token_ids: Iterable[int],
        gates: Sequence[AdmissionGate] = (),
        grammar: GrammarManager | None = None,
        clock: Clock = steady_time,
        lora: LoraManager | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._grammar = grammar
        self._speculation = speculation or NoSpeculation()
        self._config = config
        self._kv = kv
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self.waiting = WaitingRoom(config.policy, [*gates, grammar] if grammar is not None else gates, lora)
        self._queue = self.waiting.queue
        self._running: list[Request] = []  # by standing, then admission; the last one is preempted first
        self._finished_ids: list[str] = []  # the workers still hold these
        self._preempted_ids: list[str] = []  # and these, which were preempted between two steps
        self._num_added = 0
        self.ledger = Ledger(kv, clock)
        self._entrance = Entrance(config, kv, self.waiting, self._running, self.ledger)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_begun(self) -> bool:
        """Whether any request has ever run, is not finished, and is not paused by itself."""
        held = self.waiting.held
        return any(r.status is not RequestStatus.WAITING and r.request_id not in held for r in self._requests.values())

    @property
    def has_work(self) -> bool:
        """Requests to run, or workers to tell of ended ones."""
        if self._finished_ids or self._preempted_ids:
            return True
        if self.waiting.pause_state is PauseState.RUNNING:
            return len(self._requests) > len(self.waiting.held)
        return self.waiting.pause_state is PauseState.NO_NEW and self.has_begun

    @property
    def requests(self) -> Mapping[str, Request]:
        """All unfinished ones by id, oldest first; to read."""
        return self._requests

    @property
    def running(self) -> Sequence[Request]:
        """In the order in which they get their tokens; to read."""
        return self._running

    @property
    def request_ids(self) -> list[str]:
        """Of all unfinished requests, oldest first."""
        return list(self._requests)

    def add(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is already in use", param="request_id")
        self._num_added += 1
        request.number = self._num_added
        self.ledger.added(request)
        self._requests[request.request_id] = request
        self.waiting.add(request)
        if self._grammar is not None:
            self._grammar.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests where they are; their last words. Unknown and finished ids are passed over."""
        ids = dict.fromkeys(request_ids)
        aborted = [self._requests[request_id] for request_id in ids if request_id in self._requests]
        return self._end(aborted, FinishReason.ABORT)

    def fail(self, errors: Mapping[str, str], param: str | None = None) -> list[EngineOutput]:
        """End requests with what is the matter with them, and with the field of theirs that is wrong; as `abort`."""
        for request in (failed := [self._requests[name] for name in errors if name in self._requests]):
            request.error, request.error_param = errors[request.request_id], param
        return self._end(failed, FinishReason.ERROR)

    def schedule(self) -> SchedulerOutput:
        """The next step. Its tokens count as computed from now on, so that the step after it can be scheduled too."""
        self._kv.begin_step()
        preempted_ids, self._preempted_ids = self._preempted_ids, []
        batch = StepBatch.begin(self._config, preempted_ids)
        if self.waiting.pause_state is not PauseState.NOTHING:
            self._make_way(batch)
            self._schedule_running(batch)
            self._entrance.admit_waiting(batch)
        return self._build_output(batch)

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in the sampled tokens of a step; one output per request that gained any, or cannot go on.

        Results come in the order of their steps. What comes for a request that has meanwhile finished or was aborted
        comes too late and is dropped; a preempted one keeps its token.
        """
        finished, now = [], self.ledger.now()
        self.ledger.failed(result.num_corrupted)
        outputs = self.fail({request.request_id: why for request, why in self._receivers(output, result.errors)})
        pooled = [request for request, _ in self._receivers(output, result.pooled)]
        outputs += with_vectors(self._end(pooled, FinishReason.STOP), result.pooled)
        for request, chunk in self._receivers(output, result.prompt_logprobs):
            if request.prompt_logprobs is not None:
                request.prompt_logprobs.add(chunk)
        limits = self._eos_token_ids, self._config.max_model_len
        for request, sampled in self._receivers(output, result.sampled_token_ids):
            if not sampled:
                continue
            request.num_output_placeholders -= 1
            if request.request_id in output.drafts:
                self._take_back(request, len(output.drafts[request.request_id]), len(sampled) - 1)
            num_accepted, stop = append_tokens(request, sampled, *limits, self._grammar)
            self.ledger.gained(request, num_accepted, now)
            if stop is not None:
                self._finish(request, stop)
                finished.append(request)
            outputs.append(output_of(request, sampled[:num_accepted], result.logprobs.get(request.request_id)))
        self._drop_finished_from_running(finished)
        for request, drafts in self._receivers(output, result.drafts):
            self._speculation.put(request, drafts)
        return outputs

    def preempt_all(self) -> None:
        """Every running request gives up its blocks, to be computed again. For when no step is on its way."""
        while self._running:
            self.preempt(self._running[-1])

    def preempt(self, request: Request) -> None:
        """It gives up its blocks between two steps, if it has any."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._preempt(request, self._preempted_ids, None)

    def set_priority(self, request: Request, priority: int) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            request.priority = priority
            insort_right(self._running, request, key=self._queue.standing)
        else:
            self.waiting.set_priority(request, priority)

    def reset_prefix_cache(self) -> bool:
        """Forget cached content; False, and nothing done, while any request holds blocks."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        waiting, deferred, paused = self.waiting.counts
        return self.ledger.snapshot(running=len(self._running), waiting=waiting, deferred=deferred, paused=paused)

    def _receivers(self, output: SchedulerOutput, results: Mapping[str, T]) -> Iterator[tuple[Request, T]]:
        """Those still here of a step's requests, with what is for them. A newcomer may have the id of one that left."""
        for request_id, result in results.items():
            request = self._requests.get(request_id)
            if request is not None and request.added_at_step < output.step:
                yield request, result

    def _make_way(self, batch: StepBatch) -> None:
        """Preempt running requests of a lower class for the next waiting one, if that lets it in.

        It starts in the next step: nobody is admitted in one that preempts. So nothing of this step was scheduled yet
        for those who go, and nobody has found blocks that they were to fill.
        """
        if not (self._running and self._queue.outranks(self._running[-1])):
            return
        request = self.waiting.next()
        if self.waiting.own_refusal(request) is not None:
            return
        for _ in those_who_yield(request, self._running, self._queue, self._kv):
            has_place = len(self._running) < self._config.max_num_seqs
            if has_place and self._kv.can_fit(request, self._kv.get_computed_blocks(request)):
                return
            self.waiting.promise(request)
            self._preempt(self._running.pop(), batch.preempted_ids, request)

    def _schedule_running(self, batch: StepBatch) -> None:
        index, max_model_len = 0, self._config.max_model_len
        while index < len(self._running) and batch.budget > 0:
            request = self._running[index]
            behind = num_tokens_behind(request, max_model_len)
            num_new_tokens = behind if behind <= 1 else batch.cut(behind)
            # Else it waits for tokens of its own, and those after it may still run.
            if num_new_tokens > 0 and not self._speculation.holds_back(request):
                # Those after it get their next tokens before it gets drafts.
                spare = batch.budget - (len(self._running) - index)
                drafts = self._speculation.take(request, spare) if behind == 1 else []
                new_block_ids = self._allocate_or_preempt(request, num_new_tokens, drafts, batch)
                if new_block_ids is None:
                    break
                batch.add_known(request, num_new_tokens, new_block_ids, drafts)
                if num_new_tokens < behind:
                    batch.num_claimed_blocks += self._kv.num_blocks_missing(request)
            index += 1

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, drafts: list[int], batch: StepBatch
    ) -> BlockIds | None:
        """Take blocks from the last of the running requests until there are enough; None when it took its own.

        The order of running is that of scheduling, so who is preempted has got nothing in this step. `drafts` are
        cleared where there is no room for them.
        """
        new_block_ids = allocate_for_drafts(request, num_new_tokens, drafts, self._speculation, self._kv)
        while new_block_ids is None:
            new_block_ids = self._kv.allocate_slots(request, num_new_tokens)
            if new_block_ids is not None:
                break
            victim = self._running.pop()
            self._preempt(victim, batch.preempted_ids, request)
            if victim is request:
                break
        return new_block_ids

    def _preempt(self, victim: Request, preempted_ids: list[str], winner: Request | None) -> None:
        """Back to the queue. It computes everything again, except what the prefix cache still holds.

        A token of it that is on its way stays valid: that step has its blocks until it is done.
        """
        self._kv.free(victim)
        self.waiting.give_back(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        self._speculation.drop(victim.request_id)
        self.ledger.preempted(victim)
        victim.preempted_for = winner.request_id if winner is not None and winner is not victim else None
        preempted_ids.append(victim.request_id)

    def _build_output(self, batch: StepBatch) -> SchedulerOutput:
        scheduled = batch.num_scheduled_tokens
        shared = self._kv.shared_prefixes(list(scheduled)) if self._config.share_prefix_attention else []
        finished_ids, self._finished_ids = self._finished_ids, []
        num_tokens = self._config.max_num_batched_tokens - batch.budget
        return SchedulerOutput(
            step=self.ledger.scheduled(num_tokens),
            new=batch.new,
            known=batch.known,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=num_tokens,
            shared_prefixes=shared,
            finished_ids=finished_ids,
            preempted_ids=batch.preempted_ids,
            drafts=batch.drafts,
            num_drafts_wanted=self._speculation.wanted(map(self._requests.__getitem__, scheduled)),
        )

    def _take_back(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Drafts that do not stand were computed in vain. What was stored for them is written over."""
        self._speculation.checked(request, num_drafts, num_accepted, len(self._running))
        self.ledger.checked(request, num_drafts, num_accepted)
        if request.status is RequestStatus.RUNNING:  # else nothing of it counts as computed
            request.num_computed_tokens -= num_drafts - num_accepted

    def _end(self, requests: list[Request], reason: FinishReason) -> list[EngineOutput]:
        for request in requests:
            self._finish(request, (reason, None))
        self._drop_finished_from_running(requests)
        return list(map(output_of, requests))

    def _finish(self, request: Request, stop: Stop) -> None:
        if request.status is RequestStatus.RUNNING:
            self._finished_ids.append(request.request_id)
            self.waiting.release(request)
        else:
            self.waiting.remove(request)
        request.finish(*stop)
        self.ledger.finished(request)
        self._kv.free(request, forget=stop[0] is FinishReason.ERROR)
        del self._requests[request.request_id]
        self._speculation.forget(request.request_id)
        if self._grammar is not None:
            self._grammar.remove(request.request_id)

    def _drop_finished_from_running(self, finished: list[Request]) -> None:
        if finished:
            self._running[:] = [request for request in self._running if not request.is_finished]
