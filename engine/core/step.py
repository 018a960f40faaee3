"""One engine without a process around it: memory planned, requests taken in, one step at a time."""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from msgspec.structs import asdict

from inferd.engine.config import EngineConfig
from inferd.engine.core.admission import PauseState
from inferd.engine.core.calls import CallDesk, Later
from inferd.engine.core.grammar import GrammarManager
from inferd.engine.core.kv.events import KVEventLog
from inferd.engine.core.kv.hashing import make_block_hasher
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.kv.plan import plan_kv_cache
from inferd.engine.core.kv.spec import KVCacheConfig
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.errors import ContextLengthExceeded, InvalidRequest, NotSupported
from inferd.engine.executor.base import Executor, OnFailure
from inferd.engine.messages import (
    LANES,
    AddRequest,
    Call,
    CallReply,
    EngineOutput,
    EngineOutputs,
    KVEvent,
    SchedulerStats,
)
from inferd.engine.params import SamplingParams, token_ids_in
from inferd.engine.request import Request

logger = logging.getLogger(__name__)

DrainAborts = Callable[[], Iterable[str]]
ParamsCheck = Callable[[SamplingParams], None]


PAUSE_STATES = {"abort": PauseState.NOTHING, "keep": PauseState.NOTHING, "wait": PauseState.NO_NEW}
"""What goes on after `EngineCore.pause`, by its mode."""


def no_aborts() -> Iterable[str]:
    return ()


@dataclass(slots=True)
class _Launched:
    """A step on its way."""

    output: SchedulerOutput
    executed: Future[None]
    sampled: Future[ModelRunnerOutput] | None = None  # None while the grammars wait for the tokens of steps before it


class EngineCore:
    """Owns the scheduler and drives the executor. One thread calls it; only `make_request` may be called from others.

    Loading happens before: construction sizes the KV cache, allocates it and warms up. Raises `ConfigError` when not
    one request of the longest context fits. `hash_seed` names what cached blocks are hashed with; without one it is
    drawn, so that hashes of two engines never agree. `params_checks` raise `InvalidRequest` for what logits processors
    that are not built in cannot serve.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        hash_seed: bytes = b"",
        grammar: GrammarManager | None = None,
        params_checks: Sequence[ParamsCheck] = (),
    ) -> None:
        self.kv_cache_config = _plan(config, executor)
        self._config = config = _with_longest_context(config, self.kv_cache_config)
        self._kv_events = KVEventLog() if config.cache.enable_kv_events else None
        self._params_checks = params_checks
        self._executor = executor
        executor.initialize_kv_cache(self.kv_cache_config)
        executor.warm_up()
        self._scheduler = Scheduler(
            config.scheduler,
            _make_kv(config, self.kv_cache_config, self._kv_events),
            config.model.eos_token_ids,
            grammar=grammar,
        )
        self._grammar = grammar
        self._launched: deque[_Launched] = deque()  # oldest first
        self._max_launched = config.scheduler.max_concurrent_batches
        self._outbox: list[EngineOutput] = []  # for the next message
        self._desk = CallDesk({name: partial(function, self) for name, function in self.CALLS.items()})
        self.is_held = False  # the last step found requests, of which each waits for something of its own
        caching = config.cache.enable_prefix_caching
        self._block_hasher = (
            make_block_hasher(config.cache.hash_block_size, hash_seed or os.urandom(32)) if caching else None
        )
        self._seeds = random.Random(config.seed)

    @property
    def decisions(self) -> list[str]:
        """What only the memory that is left could decide."""
        fitted = self.kv_cache_config.max_model_len
        return [] if fitted is None else [f"max_model_len={fitted}: the longest that fits into the KV cache"]

    @property
    def max_model_len(self) -> int:
        return self._config.scheduler.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, telling workers of finished requests and answering calls included."""
        return bool(self._scheduler.has_work or self._launched or self._outbox or self._desk.has_ready)

    def make_request(self, add: AddRequest) -> Request:
        """Check and hash a request. Touches nothing of the scheduler, so the thread that reads the socket may do it.

        Raises `InvalidRequest`, which concerns this request alone. `max_tokens` is cut to the room the context leaves.
        """
        self._check(add)
        room = self._config.scheduler.max_model_len - len(add.prompt_token_ids)
        params = add.params
        return Request(
            add,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            block_hasher=self._block_hasher,
        )

    def add(self, add: AddRequest) -> None:
        """Raises `InvalidRequest`, as `make_request` does."""
        self.add_request(self.make_request(add))

    def add_request(self, request: Request) -> None:
        self._scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests; their last outputs. Unknown and finished ids are passed over."""
        return self._scheduler.abort(request_ids)

    def abort_all(self) -> list[EngineOutput]:
        return self._scheduler.abort(self._scheduler.request_ids)

    def step(self, drain_aborts: DrainAborts = no_aborts) -> EngineOutputs:
        """Schedule and launch the next step; then take in the oldest one, unless more may be on their way.

        Blocks until the workers are done with that one. `drain_aborts` gives the ids whose clients left meanwhile: a
        request aborted in its last step ends as aborted. Any exception is fatal to the engine.
        """
        output = self._scheduler.schedule()
        if self._grammar is not None:
            self._outbox += self._scheduler.fail(self._grammar.take_failures(), param="structured_output")
        self.is_held = output.is_empty and not self._launched
        if not output.is_empty:
            self._launch(output)
            if len(self._launched) < self._max_launched:
                return self._report([])
        outputs = self._take_in_oldest(drain_aborts)
        while self._launched and self._launched[-1].sampled is None:
            if len(self._launched) == 1:
                self._sample(self._launched[0])
            else:
                outputs += self._take_in_oldest(drain_aborts)
        return self._report(outputs)

    def call(self, call: Call) -> CallReply | None:
        """Answer a control call; None: the reply comes with the outputs of a later step."""
        return self._desk.answer(call)

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached content; False, and nothing done, while any request holds blocks."""
        return self._scheduler.reset_prefix_cache()

    def take_kv_events(self) -> list[KVEvent]:
        """Those that no message has brought yet; `step` brings them too. None without `enable_kv_events`."""
        return self._kv_events.take() if self._kv_events is not None else []

    def on_failure(self, callback: OnFailure) -> None:
        """`callback` is told, from any thread, when the executor fails while no step waits for it."""
        self._executor.on_failure(callback)

    def shutdown(self) -> None:
        if self._grammar is not None:
            self._grammar.close()
        self._executor.shutdown()

    def pause(self, mode: str = "abort", clear_cache: bool = False) -> Later:
        """Stop scheduling. Requests that come meanwhile wait for `resume`.

        "abort" ends what is there; "wait" lets what has begun finish first; "keep" leaves everything where it is.
        Answered when no step is on its way any more and nothing is left to do: True, or False when `resume` came
        first. With `clear_cache` the prefix cache is empty then, and requests that were kept compute everything again.
        """
        if mode not in PAUSE_STATES:
            raise InvalidRequest(f"unknown pause mode {mode!r}; there are: {', '.join(PAUSE_STATES)}", param="mode")
        if mode == "abort":
            self._outbox += self.abort_all()
        self._scheduler.waiting.pause_state = PAUSE_STATES[mode]
        return Later(lambda: not self.is_paused() or self._is_quiet, partial(self._finish_pause, clear_cache))

    def resume(self) -> bool:
        """Whether the engine was paused."""
        was_paused = self.is_paused()
        self._scheduler.waiting.pause_state = PauseState.RUNNING
        return was_paused

    def is_paused(self) -> bool:
        """Also while requests that have begun still run."""
        return self._scheduler.waiting.pause_state is not PauseState.RUNNING

    @property
    def _is_quiet(self) -> bool:
        return not (self._launched or self._scheduler.has_work)

    def _finish_pause(self, clear_cache: bool) -> bool:
        if not self.is_paused():
            return False
        if clear_cache:
            self._scheduler.preempt_all()
            self._scheduler.reset_prefix_cache()
        return True

    def _launch(self, output: SchedulerOutput) -> None:
        with self._blamed_on(output):
            step = _Launched(output, self._executor.execute_model(output))
        must_wait = self._grammar is not None and bool(self._launched) and self._grammar.must_wait(output)
        self._launched.append(step)
        if not must_wait:
            self._sample(step)

    def _sample(self, step: _Launched) -> None:
        bitmask = self._grammar.bitmask(step.output) if self._grammar is not None else None
        with self._blamed_on(step.output):
            step.sampled = self._executor.sample_tokens(bitmask)

    def _take_in_oldest(self, drain_aborts: DrainAborts) -> list[EngineOutput]:
        """Outputs of the oldest step on its way, when there is one. Aborts that came while it ran go before them."""
        if not self._launched:
            return self._scheduler.abort(drain_aborts())
        step = self._launched.popleft()
        assert step.sampled is not None, "a step is sampled before the one after it is taken in"
        with self._blamed_on(step.output):
            step.executed.result()
            result = step.sampled.result()
        return self._scheduler.abort(drain_aborts()) + self._scheduler.update_from_output(step.output, result)

    def _report(self, outputs: list[EngineOutput]) -> EngineOutputs:
        outputs, self._outbox = self._outbox + outputs, []
        return EngineOutputs(outputs, self._scheduler.stats(), self._desk.take_ready(), self.take_kv_events())

    @contextmanager
    def _blamed_on(self, output: SchedulerOutput) -> Iterator[None]:
        try:
            yield
        except Exception:
            scheduled, stats = output.num_scheduled_tokens, asdict(self._scheduler.stats())
            logger.error("step %d failed; tokens scheduled: %s; state: %s", output.step, scheduled, stats)
            raise

    def _check(self, add: AddRequest) -> None:
        prompt, max_model_len = add.prompt_token_ids, self._config.scheduler.max_model_len
        if not prompt:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        if len(prompt) >= max_model_len:
            raise ContextLengthExceeded(len(prompt), max_model_len)
        if add.features:
            raise NotSupported("multimodal inputs are not supported; send text only", param="features")
        if add.priority != 0 and self._config.scheduler.policy == "fcfs":
            raise NotSupported(
                "scheduling_policy=fcfs has no priorities; leave priority at 0, or choose priority or fair",
                param="priority",
            )
        if add.lane not in LANES:
            raise InvalidRequest(f"unknown lane {add.lane!r}; there are: {', '.join(LANES)}", param="lane")
        self._check_vocabulary("prompt", prompt)
        for param, token_ids in token_ids_in(add.params):
            self._check_vocabulary(param, token_ids)
        if add.params.n != 1:
            raise InvalidRequest("several answers are several requests to the engine; n is split before", param="n")
        for check in self._params_checks:
            check(add.params)
        if self._grammar is not None:
            self._grammar.check(add.params)
        elif add.params.structured_output is not None:
            raise NotSupported("this engine has no grammars; leave structured_output out", param="structured_output")

    def _check_vocabulary(self, param: str, token_ids: list[int]) -> None:
        vocab_size = self._config.model.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise InvalidRequest(
                f"token id {wrong} in {param} is outside the vocabulary; ids run from 0 to {vocab_size - 1}",
                param=param,
            )

    def _stats_by_name(self) -> dict[str, int]:
        return asdict(self.stats())

    CALLS: ClassVar[dict[str, Callable[..., Any]]] = {
        "is_paused": is_paused,
        "pause": pause,
        "reset_prefix_cache": reset_prefix_cache,
        "resume": resume,
        "stats": _stats_by_name,
    }
    """What a `Call` may name; nothing else of the engine can be reached by name."""


def _plan(config: EngineConfig, executor: Executor) -> KVCacheConfig:
    available_bytes = config.cache.kv_cache_bytes
    if available_bytes is None:
        available_bytes = executor.available_kv_bytes()
    return plan_kv_cache(
        executor.kv_specs(),
        available_bytes=available_bytes,
        max_model_len=config.scheduler.max_model_len,
        max_step_tokens=config.scheduler.max_uncomputed_tokens,
        num_blocks=config.cache.num_blocks,
        fit_max_model_len=config.scheduler.fit_max_model_len,
    )


def _with_longest_context(config: EngineConfig, plan: KVCacheConfig) -> EngineConfig:
    if plan.max_model_len is None:
        return config
    return replace(config, scheduler=replace(config.scheduler, max_model_len=plan.max_model_len))


def _make_kv(config: EngineConfig, kv_cache_config: KVCacheConfig, events: KVEventLog | None) -> KVCacheManager:
    return KVCacheManager(
        kv_cache_config,
        hash_block_size=config.cache.hash_block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_model_len=config.scheduler.max_model_len,
        max_step_tokens=config.scheduler.max_uncomputed_tokens,
        max_steps_under_way=config.scheduler.max_concurrent_batches,
        events=events,
    )
