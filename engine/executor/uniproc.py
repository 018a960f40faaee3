"""One worker in this process, for one rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from inferd.engine.config import EngineConfig
from inferd.engine.core.kv.spec import KVCacheConfig, KVSpec
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.worker.worker import Worker

T = TypeVar("T")


class UniProcExecutor:
    """Implements `Executor`; every future is resolved before it is returned."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model: LoadError or ConfigError when it cannot be."""
        self.worker = Worker(config)
        self.worker.load()

    @property
    def decisions(self) -> list[str]:
        """A sentence per choice that was made while loading."""
        return self.worker.decisions

    def kv_specs(self) -> dict[str, KVSpec]:
        return self.worker.kv_specs()

    def available_kv_bytes(self) -> int:
        return self.worker.available_kv_bytes()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.worker.initialize_kv_cache(config)

    def warm_up(self) -> None:
        self.worker.warm_up()

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        return _resolved(lambda: self.worker.execute_model(output))

    def sample_tokens(self, bitmask: Any | None = None) -> Future[ModelRunnerOutput]:
        return _resolved(lambda: self.worker.sample_tokens(bitmask))

    def shutdown(self) -> None:
        self.worker.shutdown()


def _resolved(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
