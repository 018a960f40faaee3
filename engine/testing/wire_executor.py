"""An executor whose steps and results go through their wire form, as between processes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec

from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.executor.uniproc import UniProcExecutor


class WireExecutor(UniProcExecutor):
    """Computes in this process."""

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        return super().execute_model(msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=SchedulerOutput))

    def sample_tokens(self, bitmask: Any | None = None) -> Future[ModelRunnerOutput]:
        result = super().sample_tokens(bitmask).result()
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=ModelRunnerOutput))
        return future
