"""The seam between the engine core and whatever computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from inferd.engine.core.kv.spec import KVCacheConfig, KVSpec
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.messages import MemoryRecord, SleepReport, WakeReport

OnFailure = Callable[[Exception], None]


class AdapterWorkers(Protocol):
    """What all ranks do with adapters, of an engine that has them."""

    def load_lora(self, adapter_id: int, path: str) -> str:
        """What the files in that folder hold, as a digest that all ranks agree on.

        Raises LoadError or NotSupported; then some ranks may hold the adapter, until `unload_lora`.
        """
        ...

    def unload_lora(self, adapter_id: int) -> None:
        """No step from now on has it. Unknown ids are ignored."""
        ...


class Executor(AdapterWorkers, Protocol):
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

    def sleep_refusal(self) -> str | None:
        """Why the memory of these workers cannot be given back; None when it can."""
        ...

    def sleep(self, level: int) -> SleepReport:
        """Give back all memory that has a tag, on every rank; for when no step is on its way.

        At level 1 whatever lets it come back soon is kept, at level 2 nothing is. What is not there is let go of
        further, or stays as it is. Steps that only forget requests may still be executed.
        """
        ...

    def wake(self, tags: Sequence[str]) -> WakeReport:
        """Have the memory with these tags again: weights as they were, keys and values of undefined content.

        Raises LoadError when weights cannot be loaded as they were before; then any of it may be there or not.
        """
        ...

    def memory(self) -> list[MemoryRecord]:
        """By rank."""
        ...

    def shutdown(self) -> None: ...
