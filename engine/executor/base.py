"""The seam between the engine core and whatever computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from inferd.engine.core.kv.spec import KVCacheConfig, KVSpec
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput

OnFailure = Callable[[Exception], None]


class Executor(Protocol):
    """Runs every worker of one engine. Calls come from the engine's own thread, futures resolve in order.

    `execute_model` then `sample_tokens`, once each per step: the gap between them is where a grammar's bitmask is
    computed, and what lets the next step be scheduled early. Any exception out of a future is fatal to the engine.
    """

    @property
    def decisions(self) -> list[str]:
        """A sentence per choice made while loading: kernels, attention backend."""
        ...

    def kv_specs(self) -> dict[str, KVSpec]:
        """Layer name → what that layer keeps per token."""
        ...

    def available_kv_bytes(self) -> int:
        """Memory left for KV after the weights and the largest forward pass, on the rank that has least."""
        ...

    def initialize_kv_cache(self, config: KVCacheConfig) -> None: ...

    def warm_up(self) -> None:
        """Run what compiles, captures or measures, so that the first request does not pay for it."""
        ...

    def execute_model(self, output: SchedulerOutput) -> Future[None]: ...

    def sample_tokens(self, bitmask: Any | None = None) -> Future[ModelRunnerOutput]: ...

    def on_failure(self, callback: OnFailure) -> None:
        """`callback` is told once, from any thread, when what computes is lost while nobody waits for a future; at once
        if it was lost before."""
        ...

    def shutdown(self) -> None: ...
