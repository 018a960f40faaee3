"""One worker process a rank, on this machine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from inferd.engine.config import EngineConfig
from inferd.engine.core.kv.spec import KVCacheConfig, KVSpec
from inferd.engine.core.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from inferd.engine.errors import LoadError, WorkerError
from inferd.engine.executor.base import OnFailure
from inferd.engine.executor.calls import ByRank, PendingCalls
from inferd.engine.executor.joint import joint_sleep, joint_wake
from inferd.engine.executor.shm import RingTimeout, RingWriter
from inferd.engine.executor.watch import WorkerWatch
from inferd.engine.executor.wire import (
    EXECUTE,
    OUTPUT_RANK,
    SAMPLE,
    Execute,
    RankCall,
    Sample,
    Stop,
    ToWorker,
    make_encoder,
    pack,
)
from inferd.engine.executor.workers import ASK_GRACE_S, Workers
from inferd.engine.messages import MemoryRecord, SleepReport, WakeReport

START_LIMIT_S = 600.0  # for loading, and for each other call that is no step
WORKER_MODULE = "inferd.engine.executor.worker_main"


class MultiprocExecutor:
    """Implements `Executor`. A step goes to all workers through shared memory; the output rank answers.

    Steps may be sent before earlier ones are answered; each worker takes them in order. A worker that fails in a step,
    ends, or does not answer in time is the end of them all: every future and every later call raises `WorkerError`
    with the first cause.
    """

    def __init__(self, config: EngineConfig, *, worker_module: str = WORKER_MODULE) -> None:
        """Starts the workers and loads the model: LoadError or ConfigError when it cannot be."""
        self._num_ranks = config.parallel.tensor_parallel_size
        self._step_limit_s = config.parallel.step_timeout_s
        self._workers = Workers(config, self._num_ranks, worker_module)
        self._kill = weakref.finalize(self, self._workers.kill)  # for an executor that is dropped
        self._writer = RingWriter(self._workers.steps)
        self._encoder = make_encoder()
        self._calls = PendingCalls()
        self._watch = WorkerWatch(self._workers, self._calls, self._step_limit_s)
        self._is_shut_down = False
        try:
            self.call_all("load")
        except BaseException:
            self.shutdown()
            raise

    @property
    def worker_pids(self) -> list[int]:
        """By rank."""
        return [process.pid for process in self._workers.processes]

    @property
    def decisions(self) -> list[str]:
        """A sentence per choice that was made while loading; the output rank's, since all ranks are alike."""
        sentences: list[str] = self.call_all("decisions")[OUTPUT_RANK]
        return sentences

    def kv_specs(self) -> dict[str, KVSpec]:
        """Of one rank: all ranks have equal parts."""
        specs: dict[str, KVSpec] = self.call_all("kv_specs")[OUTPUT_RANK]
        return specs

    def available_kv_bytes(self) -> int:
        """Of the rank that has least, since all ranks hold the same blocks."""
        by_rank: dict[int, int] = self.call_all("available_kv_bytes")
        return min(by_rank.values())

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.call_all("initialize_kv_cache", config)

    def warm_up(self) -> None:
        self.call_all("warm_up")

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        call = self._calls.add(EXECUTE, [OUTPUT_RANK], self._step_limit_s, lambda answers: None)
        self._send(Execute(call.number, output))
        return call.future

    def sample_tokens(self, bitmask: GrammarBitmask | None = None) -> Future[ModelRunnerOutput]:
        call = self._calls.add(SAMPLE, [OUTPUT_RANK], self._step_limit_s, lambda answers: answers[OUTPUT_RANK])
        self._send(Sample(call.number, bitmask))
        return call.future

    def on_failure(self, callback: OnFailure) -> None:
        """`callback` is called once, from any thread, when a worker has failed; at once if that was before."""
        self._watch.on_failure(callback)

    def sleep_refusal(self) -> str | None:
        refusal: str | None = self.call_all("sleep_refusal")[OUTPUT_RANK]
        return refusal

    def sleep(self, level: int) -> SleepReport:
        return joint_sleep(self.call_all("sleep", level).values())

    def wake(self, tags: Sequence[str]) -> WakeReport:
        return joint_wake(self.call_all("wake", list(tags)).values())

    def memory(self) -> list[MemoryRecord]:
        by_rank = self.call_all("memory")
        return [msgspec.convert(by_rank[rank], MemoryRecord) for rank in sorted(by_rank)]

    def load_lora(self, adapter_id: int, path: str) -> str:
        digests = set(self.call_all("load_lora", adapter_id, path).values())
        if len(digests) > 1:
            raise LoadError(f"{path} was changed while the workers read it; try again")
        return str(digests.pop())

    def unload_lora(self, adapter_id: int) -> None:
        self.call_all("unload_lora", adapter_id)

    def call_all(self, method: str, *args: Any) -> ByRank:
        """Every rank's answer to a call that `WorkerLoop` knows.

        Raises the first error of a rank as the kind that it was, and WorkerError when a rank does not answer.
        """
        call = self._calls.add(method, range(self._num_ranks), START_LIMIT_S, lambda answers: answers)
        self._send(RankCall(call.number, method, pack(args)))
        answers: ByRank = call.future.result()
        return answers

    def shutdown(self) -> None:
        """Idempotent. Workers are asked to end, then told, then forced; nothing of them stays."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._watch.stop()
        was_well = self._calls.close(WorkerError("the executor was shut down"))
        self._workers.end(ask=was_well and self._ask_to_stop())
        self._kill.detach()
        self._watch.close()
        self._writer.close()
        self._workers.close()

    def _ask_to_stop(self) -> bool:
        try:
            self._writer.write(self._encoder.encode(Stop()), ASK_GRACE_S)
        except RingTimeout:
            return False
        return True

    def _send(self, message: ToWorker) -> None:
        try:
            self._writer.write(self._encoder.encode(message), self._step_limit_s, self._watch.failed_fd)
        except RingTimeout as error:
            self._watch.fail(WorkerError(f"workers take no more steps: {error}"))
