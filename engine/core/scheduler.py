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

from msgspec.structs import replace

from inferd.engine.config import SchedulerConfig
from inferd.engine.core.admission import AdmissionGate, PauseState, Refusal, WaitReason
from inferd.engine.core.batch import StepBatch, num_tokens_behind
from inferd.engine.core.grammar import GrammarManager
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.output import BlockIds, ModelRunnerOutput, SchedulerOutput
from inferd.engine.core.stops import Stop, append_tokens
from inferd.engine.core.waiting import WaitingRoom
from inferd.engine.errors import InvalidRequest
from inferd.engine.logprobs import TokenLogprobs
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
    ) -> None:
        self._grammar = grammar
        self._config = config
        self._kv = kv
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self.waiting = WaitingRoom(config.policy, [*gates, grammar] if grammar is not None else gates)
        self._queue = self.waiting.queue
        self._running: list[Request] = []  # by standing, then admission; the last one is preempted first
        self._finished_ids: list[str] = []  # the workers still hold these
        self._preempted_ids: list[str] = []  # and these, which were preempted between two steps
        self._num_added = 0
        self._stats = SchedulerStats(blocks_total=kv.num_total_blocks)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_begun(self) -> bool:
        """Whether any request has ever run and is not finished."""
        return any(request.status is not RequestStatus.WAITING for request in self._requests.values())

    @property
    def has_work(self) -> bool:
        """Requests to run, or workers to tell of ended ones."""
        if self._finished_ids or self._preempted_ids:
            return True
        if self.waiting.pause_state is PauseState.RUNNING:
            return bool(self._requests)
        return self.waiting.pause_state is PauseState.NO_NEW and self.has_begun

    @property
    def request_ids(self) -> list[str]:
        """Of all unfinished requests, oldest first."""
        return list(self._requests)

    def add(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is already in use", param="request_id")
        self._num_added += 1
        request.number = self._num_added
        request.added_at_step = self._stats.step
        self._requests[request.request_id] = request
        self._queue.add(request)
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
        batch = StepBatch(
            self._config.max_num_batched_tokens, self._config.long_prefill_token_threshold, preempted_ids=preempted_ids
        )
        if self.waiting.pause_state is not PauseState.NOTHING:
            self._make_way(batch)
            self._schedule_running(batch)
            self._admit_waiting(batch)
        return self._build_output(batch)

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in the sampled tokens of a step; one output per request that gained any, or cannot go on.

        Results come in the order of their steps. What comes for a request that has meanwhile finished or was aborted
        comes too late and is dropped; a preempted one keeps its token.
        """
        finished = []
        outputs = self.fail({request.request_id: why for request, why in self._receivers(output, result.errors)})
        for request, chunk in self._receivers(output, result.prompt_logprobs):
            if request.prompt_logprobs is not None:
                request.prompt_logprobs.add(chunk)
        limits = self._eos_token_ids, self._config.max_model_len
        for request, sampled in self._receivers(output, result.sampled_token_ids):
            if not sampled:
                continue
            request.num_output_placeholders -= 1
            num_accepted, stop = append_tokens(request, sampled, *limits, self._grammar)
            self._stats.generated_tokens += num_accepted
            if stop is not None:
                self._finish(request, stop)
                finished.append(request)
            outputs.append(_output_of(request, sampled[:num_accepted], result.logprobs.get(request.request_id)))
        self._drop_finished_from_running(finished)
        return outputs

    def preempt_all(self) -> None:
        """Every running request gives up its blocks, to be computed again. For when no step is on its way."""
        while self._running:
            self._preempt(self._running.pop(), self._preempted_ids, None)

    def reset_prefix_cache(self) -> bool:
        """Forget cached content; False, and nothing done, while any request holds blocks."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._queue),
            blocks_free=self._kv.num_free_blocks,
        )

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
        better = self._queue.standing(request)[0]
        lower = [running for running in self._running if self._queue.standing(running)[0] > better]
        if not lower or self.waiting.own_refusal(request) is not None:
            return
        most_free = self._kv.num_free_blocks + sum(self._kv.num_blocks_held(victim.request_id) for victim in lower)
        if self._kv.num_blocks_needed(request, self._kv.get_computed_blocks(request)) > most_free:
            return
        for _ in lower:
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
            if num_new_tokens > 0:  # else it waits for its own last token, and those after it may still run
                new_block_ids = self._allocate_or_preempt(request, num_new_tokens, batch)
                if new_block_ids is None:
                    break
                batch.add_known(request, num_new_tokens, new_block_ids)
                if num_new_tokens < behind:
                    batch.num_claimed_blocks += self._kv.num_blocks_missing(request)
            index += 1

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int, batch: StepBatch) -> BlockIds | None:
        """Take blocks from the last of the running requests until there are enough; None when it took its own.

        The order of running is that of scheduling, so who is preempted has got nothing in this step.
        """
        while True:
            new_block_ids = self._kv.allocate_slots(request, num_new_tokens)
            if new_block_ids is not None:
                return new_block_ids
            victim = self._running.pop()
            self._preempt(victim, batch.preempted_ids, request)
            if victim is request:
                return None

    def _preempt(self, victim: Request, preempted_ids: list[str], winner: Request | None) -> None:
        """Back to the queue. It computes everything again, except what the prefix cache still holds.

        A token of it that is on its way stays valid: that step has its blocks until it is done.
        """
        self._kv.free(victim)
        self._queue.prepend(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.preempted_for = winner.request_id if winner is not None and winner is not victim else None
        preempted_ids.append(victim.request_id)
        self._stats.preemptions += 1

    def _admit_waiting(self, batch: StepBatch) -> None:
        """In strict order: the first that does not fit holds up those behind it, or long prompts would starve.

        Only who waits for something of his own is passed by.
        """
        waiting = self.waiting
        waiting.begin_step()
        waiting.head_refusal = self._step_refusal(batch)
        while waiting.head_refusal is None and self._queue:
            request = waiting.next()
            refusal = waiting.own_refusal(request)
            if refusal is not None:
                waiting.pass_by(request, refusal)
            else:
                waiting.head_refusal = self._admit(request, batch) or self._step_refusal(batch)
        waiting.end_step()

    def _step_refusal(self, batch: StepBatch) -> Refusal | None:
        """What the step has no more of, for anybody. Who made room must not see it given to a newcomer."""
        if not self._queue:
            return None
        if batch.preempted_ids:
            return Refusal(WaitReason.PREEMPTION)
        if len(self._running) >= self._config.max_num_seqs:
            return Refusal(WaitReason.SEQ_LIMIT, len(self._running) + 1, self._config.max_num_seqs)
        if batch.budget <= 0:
            return Refusal(WaitReason.TOKEN_BUDGET, 1, 0)
        return None

    def _admit(self, request: Request, batch: StepBatch) -> Refusal | None:
        """Start the next waiting request, if all of it fits: half-admitted prompts would evict each other.

        Blocks that running requests still need for what they know are not free for it.
        """
        if request.num_output_placeholders:
            return Refusal(WaitReason.TOKEN_ON_ITS_WAY, request.num_output_placeholders)
        computed = self._kv.get_computed_blocks(request)
        needed = self._kv.num_blocks_needed(request, computed)
        available = self._kv.num_free_blocks - batch.num_claimed_blocks
        if needed > available:
            return Refusal(WaitReason.KV_FULL, needed, max(available, 0))
        behind = request.num_tokens - computed.num_tokens
        num_new_tokens = batch.cut(behind)
        if self._kv.allocate_slots(request, num_new_tokens, computed) is None:
            return Refusal(WaitReason.KV_FULL, needed, max(available, 0))
        self._count_admission(request, computed.num_tokens)
        request.num_computed_tokens = computed.num_tokens
        request.status = RequestStatus.RUNNING
        self.waiting.take(request)
        insort_right(self._running, request, key=self._queue.standing)
        batch.add_new(request, num_new_tokens, self._kv.block_ids(request.request_id))
        if num_new_tokens < behind:
            batch.num_claimed_blocks += self._kv.num_blocks_missing(request)
        return None

    def _count_admission(self, request: Request, num_cached_tokens: int) -> None:
        """A preempted request that finds its own blocks again is no hit that the client paid less for."""
        if request.num_preemptions:
            return
        request.num_cached_tokens = num_cached_tokens
        self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.prefix_queried_tokens += request.num_prompt_tokens
        self._stats.prefix_hit_tokens += num_cached_tokens

    def _build_output(self, batch: StepBatch) -> SchedulerOutput:
        scheduled = batch.num_scheduled_tokens
        shared = self._kv.shared_prefixes(list(scheduled)) if self._config.share_prefix_attention else []
        finished_ids, self._finished_ids = self._finished_ids, []
        self._stats.step += 1
        return SchedulerOutput(
            step=self._stats.step,
            new=batch.new,
            known=batch.known,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=self._config.max_num_batched_tokens - batch.budget,
            shared_prefixes=shared,
            finished_ids=finished_ids,
            preempted_ids=batch.preempted_ids,
        )

    def _end(self, requests: list[Request], reason: FinishReason) -> list[EngineOutput]:
        for request in requests:
            self._finish(request, (reason, None))
        self._drop_finished_from_running(requests)
        return list(map(_output_of, requests))

    def _finish(self, request: Request, stop: Stop) -> None:
        if request.status is RequestStatus.RUNNING:
            self._finished_ids.append(request.request_id)
            self._queue.release(request)
        else:
            self.waiting.remove(request)
        request.finish(*stop)
        self._kv.free(request, forget=stop[0] is FinishReason.ERROR)
        del self._requests[request.request_id]
        if self._grammar is not None:
            self._grammar.remove(request.request_id)

    def _drop_finished_from_running(self, finished: list[Request]) -> None:
        if finished:
            self._running = [request for request in self._running if not request.is_finished]


def _output_of(
    request: Request, new_token_ids: Sequence[int] = (), logprobs: TokenLogprobs | None = None
) -> EngineOutput:
    """`logprobs` are of all tokens sampled, those after a stop among them."""
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=list(new_token_ids),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        error=request.error,
        error_param=request.error_param,
        logprobs=logprobs.cut(0, len(new_token_ids)) if logprobs is not None else None,
        prompt_logprobs=request.prompt_logprobs.take() if request.prompt_logprobs is not None else None,
    )
