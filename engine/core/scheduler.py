"""Who computes how many tokens in the next step.

There is no prefill and no decode. Each request has `num_computed_tokens` chasing `num_tokens`, a step has one token
budget, and a request that is behind takes from it what it can: running requests first, then waiting ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from inferd.engine.config import SchedulerConfig
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.output import BlockIds, KnownRequests, ModelRunnerOutput, NewRequest, SchedulerOutput
from inferd.engine.core.queue import FCFSRequestQueue, RequestQueue
from inferd.engine.errors import InvalidRequest
from inferd.engine.messages import EngineOutput, FinishReason, SchedulerStats
from inferd.engine.request import Request, RequestStatus

Stop = tuple[FinishReason, int | None]


@dataclass(slots=True)
class _Batch:
    """The step that is being put together. What is in it is counted as computed at once."""

    budget: int
    new: list[NewRequest] = field(default_factory=list)
    known: KnownRequests = field(default_factory=KnownRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_ids: list[str] = field(default_factory=list)

    def add_known(self, request: Request, num_new_tokens: int, new_block_ids: BlockIds) -> None:
        self.known.request_ids.append(request.request_id)
        self.known.new_block_ids.append(new_block_ids or None)
        self.known.num_computed_tokens.append(request.num_computed_tokens)
        self._take(request, num_new_tokens)

    def add_new(self, request: Request, num_new_tokens: int, block_ids: BlockIds) -> None:
        self.new.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                seed=request.seed,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
                features=list(request.features) if request.features else None,
            )
        )
        self._take(request, num_new_tokens)

    def _take(self, request: Request, num_new_tokens: int) -> None:
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.budget -= num_new_tokens
        request.num_computed_tokens += num_new_tokens


class Scheduler:
    """Owns every unfinished request and, through its `KVCacheManager`, every block. Not thread-safe."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, eos_token_ids: Iterable[int]) -> None:
        self._config = config
        self._kv = kv
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._waiting: RequestQueue = FCFSRequestQueue()
        self._running: list[Request] = []  # in order of admission; the last one is preempted first
        self._finished_ids: list[str] = []  # the workers still hold these
        self._stats = SchedulerStats(blocks_total=kv.num_total_blocks)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Requests to run, or workers to tell of finished ones."""
        return bool(self._requests or self._finished_ids)

    @property
    def request_ids(self) -> list[str]:
        """Of all unfinished requests, oldest first."""
        return list(self._requests)

    def add(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is already in use", param="request_id")
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests where they are; their last words. Unknown and finished ids are passed over."""
        ids = dict.fromkeys(request_ids)
        aborted = [self._requests[request_id] for request_id in ids if request_id in self._requests]
        for request in aborted:
            if request.status is not RequestStatus.RUNNING:
                self._waiting.remove(request.request_id)
            self._finish(request, (FinishReason.ABORT, None))
        self._drop_finished_from_running(aborted)
        return [_output_of(request, []) for request in aborted]

    def schedule(self) -> SchedulerOutput:
        """The next step. Its tokens count as computed from now on, so that the step after it can be scheduled too."""
        self._kv.begin_step()
        batch = _Batch(self._config.max_num_batched_tokens)
        self._schedule_running(batch)
        if not batch.preempted_ids:  # who made room must not see it given to a newcomer
            self._admit_waiting(batch)
        return self._build_output(batch)

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Take in the sampled tokens of a step; one output per request that gained any, or cannot go on.

        What comes for a request that has meanwhile finished or was aborted comes too late and is dropped.
        """
        finished = [self._requests[request_id] for request_id in result.errors if request_id in self._requests]
        for failed in finished:
            failed.error = result.errors[failed.request_id]
            self._finish(failed, (FinishReason.ERROR, None))
        outputs = [_output_of(failed, []) for failed in finished]
        for request_id, sampled in result.sampled_token_ids.items():
            request = self._requests.get(request_id)
            if request is None or not sampled:
                continue
            num_accepted, stop = self._append_tokens(request, sampled)
            self._stats.generated_tokens += num_accepted
            if stop is not None:
                self._finish(request, stop)
                finished.append(request)
            outputs.append(_output_of(request, sampled[:num_accepted]))
        self._drop_finished_from_running(finished)
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget cached content; False, and nothing done, while any request holds blocks."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_free=self._kv.num_free_blocks,
        )

    def _schedule_running(self, batch: _Batch) -> None:
        index = 0
        while index < len(self._running) and batch.budget > 0:
            request = self._running[index]
            num_new_tokens = min(self._num_tokens_behind(request), batch.budget)
            if num_new_tokens > 0:  # else it waits for its own last token, and those after it may still run
                new_block_ids = self._allocate_or_preempt(request, num_new_tokens, batch)
                if new_block_ids is None:
                    break
                batch.add_known(request, num_new_tokens, new_block_ids)
            index += 1

    def _num_tokens_behind(self, request: Request) -> int:
        """Tokens that the request could compute now. Its very last one is never fed back, so it is never computed."""
        longest = min(self._config.max_model_len, request.num_prompt_tokens + request.max_tokens)
        known = min(len(request.token_ids) + request.num_output_placeholders, longest - 1)
        return known - request.num_computed_tokens

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int, batch: _Batch) -> BlockIds | None:
        """Take blocks from the newest running requests until there are enough; None when it took its own."""
        while True:
            new_block_ids = self._kv.allocate_slots(request, num_new_tokens)
            if new_block_ids is not None:
                return new_block_ids
            victim = self._running.pop()
            self._preempt(victim)
            batch.preempted_ids.append(victim.request_id)
            if victim is request:
                return None

    def _preempt(self, victim: Request) -> None:
        """Back to the queue's front. It computes everything again, except what the prefix cache still holds."""
        self._kv.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_output_placeholders = 0
        victim.num_preemptions += 1
        self._stats.preemptions += 1
        self._waiting.prepend(victim)

    def _admit_waiting(self, batch: _Batch) -> None:
        """In strict order: the first that does not fit holds up those behind it, or long prompts would starve."""
        while self._waiting and batch.budget > 0 and len(self._running) < self._config.max_num_seqs:
            if not self._admit(self._waiting.peek(), batch):
                break

    def _admit(self, request: Request, batch: _Batch) -> bool:
        """Start the next waiting request, if all of it fits: half-admitted prompts would evict each other.

        No running request has a claim on the free blocks then. One that was still behind would have used up the
        budget, and nobody would be admitted.
        """
        computed = self._kv.get_computed_blocks(request)
        if not self._kv.can_fit(request, computed):
            return False
        num_new_tokens = min(request.num_tokens - computed.num_tokens, batch.budget)
        if self._kv.allocate_slots(request, num_new_tokens, computed) is None:
            return False
        self._count_admission(request, computed.num_tokens)
        request.num_computed_tokens = computed.num_tokens
        request.status = RequestStatus.RUNNING
        self._running.append(self._waiting.pop())
        batch.add_new(request, num_new_tokens, self._kv.block_ids(request.request_id))
        return True

    def _count_admission(self, request: Request, num_cached_tokens: int) -> None:
        """A preempted request that finds its own blocks again is no hit that the client paid less for."""
        if request.num_preemptions:
            return
        request.num_cached_tokens = num_cached_tokens
        self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.prefix_queried_tokens += request.num_prompt_tokens
        self._stats.prefix_hit_tokens += num_cached_tokens

    def _build_output(self, batch: _Batch) -> SchedulerOutput:
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

    def _append_tokens(self, request: Request, sampled: list[int]) -> tuple[int, Stop | None]:
        """Append tokens up to the first that ends the request; how many that were, and why it ended."""
        for count, token_id in enumerate(sampled, 1):
            request.append_token(token_id)
            stop = find_stop(request, token_id, self._eos_token_ids, self._config.max_model_len)
            if stop is not None:
                return count, stop
        return len(sampled), None

    def _finish(self, request: Request, stop: Stop) -> None:
        if request.status is RequestStatus.RUNNING:
            self._finished_ids.append(request.request_id)
        request.finish(*stop)
        self._kv.free(request, forget=stop[0] is FinishReason.ERROR)
        del self._requests[request.request_id]

    def _drop_finished_from_running(self, finished: list[Request]) -> None:
        if finished:
            self._running = [request for request in self._running if not request.is_finished]


def find_stop(request: Request, token_id: int, eos_token_ids: Collection[int], max_model_len: int) -> Stop | None:
    """Whether the request ends with `token_id`, its newest token, and why."""
    params, num_output_tokens = request.params, request.num_output_tokens
    if num_output_tokens >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output_tokens >= request.max_tokens or request.num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None


def _output_of(request: Request, new_token_ids: list[int]) -> EngineOutput:
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        error=request.error,
    )
