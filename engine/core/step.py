"""One engine without a process around it: memory planned, requests taken in, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import asdict

from inferd.engine.config import EngineConfig
from inferd.engine.core.actions import Actions
from inferd.engine.core.calls import CallDesk, Later
from inferd.engine.core.canary import Canary
from inferd.engine.core.clock import Clock, steady_time
from inferd.engine.core.grammar import GrammarManager
from inferd.engine.core.insight.insight import Insight
from inferd.engine.core.insight.standstill import find_standstill
from inferd.engine.core.intake import Intake, ParamsCheck
from inferd.engine.core.kv.events import KVEventLog
from inferd.engine.core.kv.setup import make_manager, max_concurrency, plan_for, with_longest_context
from inferd.engine.core.lora import NO_LORA_CALLS, LoraManager
from inferd.engine.core.pausing import Pausing
from inferd.engine.core.pipeline import Pipeline
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.core.sleeper import Sleeper
from inferd.engine.executor.base import Executor, OnFailure
from inferd.engine.messages import AddRequest, Call, CallReply, EngineOutput, EngineOutputs, KVEvent, SchedulerStats
from inferd.engine.request import Request
from inferd.engine.spec.desk import make_speculation

DrainAborts = Callable[[], Iterable[str]]


def no_aborts() -> Iterable[str]:
    return ()


class EngineCore:
    """Owns the scheduler and drives the executor. One thread calls it; only `make_request` may be called from others.

    Loading happens before: construction sizes the KV cache, allocates it and warms up. Raises `ConfigError` when not
    one request of the longest context fits. `hash_seed` and `params_checks`: see `Intake`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        hash_seed: bytes = b"",
        grammar: GrammarManager | None = None,
        params_checks: Sequence[ParamsCheck] = (),
        lora: LoraManager | None = None,
        clock: Clock = steady_time,
    ) -> None:
        self.kv_cache_config = plan_for(config, executor)
        self._config = config = with_longest_context(config, self.kv_cache_config)
        self._kv_events = KVEventLog() if config.cache.enable_kv_events else None
        self._executor = executor
        self._clock = clock
        executor.initialize_kv_cache(self.kv_cache_config)
        executor.warm_up()
        kv = make_manager(config, self.kv_cache_config, self._kv_events, clock)
        self._scheduler = Scheduler(
            config.scheduler,
            kv,
            config.model.eos_token_ids,
            grammar=grammar,
            lora=lora,
            clock=clock,
            speculation=make_speculation(config),
        )
        self._grammar = grammar
        self._lora = lora
        self._intake = Intake(config, hash_seed=hash_seed, grammar=grammar, params_checks=params_checks, lora=lora)
        depth = config.scheduler.max_concurrent_batches
        self._pipeline = Pipeline(executor, grammar, depth, describe=lambda: asdict(self.stats()), clock=clock)
        self._outbox: list[EngineOutput] = []  # for the next message
        self.sleeper = Sleeper(
            self._scheduler,
            executor,
            is_quiet=lambda: not (self._pipeline or self._scheduler.has_work),
            emit=self._outbox.extend,
            canary=None if config.pooler else Canary(self.kv_cache_config, config.model.vocab_size, self.max_model_len),
        )
        self._pausing = Pausing(
            self._scheduler, self._pipeline.__len__, self._outbox.extend, check=self.sleeper.check, clock=clock
        )
        self.insight = Insight(
            self._scheduler, kv, config.scheduler, clock, lambda: find_standstill(self.sleeper.state, self._pausing)
        )
        has_priorities = config.scheduler.policy != "fcfs"
        self._actions = Actions(self._scheduler, clock, self._outbox.extend, has_priorities=has_priorities)
        self._desk = CallDesk(
            {
                "reset_prefix_cache": self.reset_prefix_cache,
                "stats": lambda: asdict(self.stats()),
                **(lora.calls if lora is not None else NO_LORA_CALLS),
                **self._pausing.calls,
                **self._actions.calls,
                **self.insight.calls,
                **self.sleeper.calls,
            }
        )
        self.is_held = False  # the last step found requests, of which each waits for something of its own

    @property
    def decisions(self) -> list[str]:
        """What only the memory that is left could decide."""
        fitted = self.kv_cache_config.max_model_len
        return [] if fitted is None else [f"max_model_len={fitted}: the longest that fits into the KV cache"]

    @property
    def max_model_len(self) -> int:
        return self._config.scheduler.max_model_len

    @property
    def kv_max_concurrency(self) -> float:
        """How many requests of the longest context fit at once."""
        return max_concurrency(self._config, self.kv_cache_config)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, telling workers of finished requests and answering calls included."""
        return bool(self._scheduler.has_work or self._pipeline or self._outbox or self._desk.has_ready)

    def make_request(self, add: AddRequest) -> Request:
        """Check and hash a request. Raises `InvalidRequest`, which concerns this request alone."""
        return self._intake.make_request(add)

    def add(self, add: AddRequest) -> None:
        """Raises `InvalidRequest`, as `make_request` does, and what `add_request` raises."""
        self.add_request(self.make_request(add))

    def add_request(self, request: Request) -> None:
        """Raises `EngineAsleep` when the engine sleeps and was told to refuse requests."""
        self.sleeper.admit()
        if self._lora is not None:
            self._lora.check(request)
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
        if self._lora is not None:
            self._outbox += self._scheduler.fail(self._lora.take_failures())
        self.is_held = output.is_empty and not self._pipeline
        if not output.is_empty:
            self._pipeline.launch(output)
            self.insight.launched(output)
            if not self._pipeline.is_full:
                return self._report([])
        outputs = self._take_in_oldest(drain_aborts)
        while self._pipeline.has_unsampled:
            if len(self._pipeline) == 1:
                self._pipeline.sample()
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
        """See `Pausing.pause`."""
        return self._pausing.pause(mode, clear_cache)

    def resume(self) -> bool:
        """Whether the engine was paused."""
        return self._pausing.resume()

    def is_paused(self) -> bool:
        """Also while requests that have begun still run."""
        return self._pausing.is_paused()

    def _take_in_oldest(self, drain_aborts: DrainAborts) -> list[EngineOutput]:
        """Outputs of the oldest step on its way, when there is one. Aborts that came while it ran go before them."""
        if not self._pipeline:
            return self._scheduler.abort(drain_aborts())
        landed = self._pipeline.take_in()
        self.insight.landed(landed)
        outputs = self._scheduler.abort(drain_aborts())
        return outputs + self._scheduler.update_from_output(landed.output, landed.result)

    def _report(self, outputs: list[EngineOutput]) -> EngineOutputs:
        outputs = self._outbox + outputs
        self._outbox.clear()
        reply, feed = self._desk.take_ready(), self.insight.take_update()
        return EngineOutputs(outputs, self._scheduler.stats(), reply, self.take_kv_events(), feed, at=self._clock())
