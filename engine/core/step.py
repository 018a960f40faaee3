"""One engine without a process around it: memory planned, requests taken in, one step at a time."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from msgspec.structs import asdict

from inferd.engine.config import EngineConfig
from inferd.engine.core.kv.hashing import make_block_hasher
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.kv.plan import plan_kv_cache
from inferd.engine.core.kv.spec import KVCacheConfig
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.errors import ContextLengthExceeded, InvalidRequest, NotSupported
from inferd.engine.executor.base import Executor
from inferd.engine.messages import AddRequest, Call, CallReply, EngineOutput, EngineOutputs, SchedulerStats
from inferd.engine.request import Request

logger = logging.getLogger(__name__)

DrainAborts = Callable[[], Iterable[str]]


def no_aborts() -> Iterable[str]:
    return ()


class EngineCore:
    """Owns the scheduler and drives the executor. One thread calls it; only `make_request` may be called from others.

    Loading happens before: construction sizes the KV cache, allocates it and warms up. Raises `ConfigError` when not
    one request of the longest context fits. `hash_seed` names what cached blocks are hashed with; without one it is
    drawn, so that hashes of two engines never agree.
    """

    def __init__(self, config: EngineConfig, executor: Executor, *, hash_seed: bytes = b"") -> None:
        self._config = config
        self._executor = executor
        self.kv_cache_config = _plan(config, executor)
        executor.initialize_kv_cache(self.kv_cache_config)
        executor.warm_up()
        self._scheduler = Scheduler(
            config.scheduler, _make_kv(config, self.kv_cache_config), config.model.eos_token_ids
        )
        caching = config.cache.enable_prefix_caching
        self._block_hasher = (
            make_block_hasher(config.cache.hash_block_size, hash_seed or os.urandom(32)) if caching else None
        )
        self._seeds = random.Random(config.seed)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, telling workers of finished requests included."""
        return self._scheduler.has_work

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
        """Schedule, compute, sample, take in. Blocks until the workers are done.

        `drain_aborts` gives the ids whose clients left during the computation: a request aborted in its last step
        ends as aborted. Any exception is fatal to the engine.
        """
        output = self._scheduler.schedule()
        if output.is_empty:
            return EngineOutputs(outputs=self._scheduler.abort(drain_aborts()), stats=self._scheduler.stats())
        result = self._compute(output)
        outputs = self._scheduler.abort(drain_aborts())
        outputs += self._scheduler.update_from_output(output, result)
        return EngineOutputs(outputs=outputs, stats=self._scheduler.stats())

    def call(self, call: Call) -> CallReply:
        """Answer a control call. What goes wrong in it goes back to the caller."""
        function = self.CALLS.get(call.method)
        if function is None:
            names = ", ".join(sorted(self.CALLS))
            return CallReply(call.call_id, error=f"unknown call {call.method!r}; there are: {names}")
        try:
            return CallReply(call.call_id, result=function(self, *call.args))
        except Exception as error:
            return CallReply(call.call_id, error=f"{call.method}: {type(error).__name__}: {error}")

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached content; False, and nothing done, while any request holds blocks."""
        return self._scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        try:
            self._executor.execute_model(output).result()
            return self._executor.sample_tokens(None).result()
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
        if add.priority != 0:
            raise NotSupported("request priorities are not supported; leave priority at 0", param="priority")
        self._check_vocabulary("prompt", prompt)
        self._check_vocabulary("stop_token_ids", add.params.stop_token_ids)

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
        "reset_prefix_cache": reset_prefix_cache,
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
        num_blocks=config.cache.num_blocks,
    )


def _make_kv(config: EngineConfig, kv_cache_config: KVCacheConfig) -> KVCacheManager:
    return KVCacheManager(
        kv_cache_config,
        hash_block_size=config.cache.hash_block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_model_len=config.scheduler.max_model_len,
    )
