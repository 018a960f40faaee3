"""One worker in this process, for one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from inferd.engine.config import EngineConfig
from inferd.engine.core.kv.spec import KVCacheConfig, KVSpec
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.executor.base import OnFailure
from inferd.engine.executor.joint import joint_sleep, joint_wake
from inferd.engine.messages import MemoryRecord, SleepReport, WakeReport
from inferd.engine.worker.worker import Worker

T = TypeVar("T")


class UniProcExecutor:
    """Implements `Executor`. With asynchronous scheduling the worker lives on a thread of its own from the beginning:
    what libraries keep per thread stays with it, and futures resolve while the caller goes on. Without, every future
    is resolved before it is returned.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model: LoadError or ConfigError when it cannot be."""
        is_async = config.scheduler.max_concurrent_batches > 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-worker") if is_async else None
        try:
            self.worker = self._do(lambda: Worker(config))
            self._do(self.worker.load)
        except BaseException:
            self._end_thread()
            raise

    @property
    def decisions(self) -> list[str]:
        """A sentence per choice that was made while loading."""
        return self.worker.decisions

    def kv_specs(self) -> dict[str, KVSpec]:
        return self.worker.kv_specs()

    def available_kv_bytes(self) -> int:
        return self._do(self.worker.available_kv_bytes)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._do(lambda: self.worker.initialize_kv_cache(config))

    def warm_up(self) -> None:
        self._do(self.worker.warm_up)

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        return self._begin(lambda: self.worker.execute_model(output))

    def sample_tokens(self, bitmask: Any | None = None) -> Future[ModelRunnerOutput]:
        return self._begin(lambda: self.worker.sample_tokens(bitmask))

    def load_lora(self, adapter_id: int, path: str) -> str:
        return self._do(lambda: self.worker.load_lora(adapter_id, path))

    def unload_lora(self, adapter_id: int) -> None:
        self._do(lambda: self.worker.unload_lora(adapter_id))

    def on_failure(self, callback: OnFailure) -> None:
        """Never told: this worker fails in a call or not at all."""

    def sleep_refusal(self) -> str | None:
        return self.worker.sleep_refusal()

    def sleep(self, level: int) -> SleepReport:
        return joint_sleep([self._do(lambda: self.worker.sleep(level))])

    def wake(self, tags: Sequence[str]) -> WakeReport:
        return joint_wake([self._do(lambda: self.worker.wake(tags))])

    def memory(self) -> list[MemoryRecord]:
        return [self.worker.memory()]

    def shutdown(self) -> None:
        """After what was begun. Idempotent."""
        self._end_thread()
        self.worker.shutdown()

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        return self._thread.submit(work) if self._thread is not None else _resolved(work)

    def _do(self, work: Callable[[], T]) -> T:
        return self._begin(work).result()

    def _end_thread(self) -> None:
        """What the thread was given is done first."""
        if self._thread is not None:
            self._thread.shutdown()


def _resolved(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
