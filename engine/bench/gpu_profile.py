"""Where the time of a decode step goes: on the host before and after the card's own part of it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch

from inferd.engine.build import make_executor
from inferd.engine.config import EngineArgs
from inferd.engine.core.kv.spec import KVCacheConfig, KVSpec
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.core.step import EngineCore
from inferd.engine.executor.base import Executor, OnFailure
from inferd.engine.messages import AddRequest, MemoryRecord, SleepReport, WakeReport
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 48


@dataclass(frozen=True)
class StepParts:
    """Medians over the steps in which every row had one token.

    schedule: until the executor is called; launch: rows, inputs, their copy and the launch; wait: until the card has
    the logits; sample: until the ids are here; update: stops, blocks and outputs.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("schedule", "launch", "wait", "sample", "update")

    num_rows: int
    num_steps: int
    medians_ms: list[float]


class TimedExecutor:
    """Passes everything on, and notes when the halves of a step begin and end. Waits for the card between them."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.marks: list[float] = []
        self.num_tokens = 0

    @property
    def decisions(self) -> list[str]:
        return self._inner.decisions

    def kv_specs(self) -> dict[str, KVSpec]:
        return self._inner.kv_specs()

    def available_kv_bytes(self) -> int:
        return self._inner.available_kv_bytes()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._inner.initialize_kv_cache(config)

    def warm_up(self) -> None:
        self._inner.warm_up()

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        self.num_tokens = output.total_num_scheduled_tokens
        self.marks = [time.perf_counter()]
        future = self._inner.execute_model(output)
        self.marks.append(time.perf_counter())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        return future

    def sample_tokens(self, bitmask: Any | None = None) -> Future[ModelRunnerOutput]:
        future = self._inner.sample_tokens(bitmask)
        future.result()
        self.marks.append(time.perf_counter())
        return future

    def load_lora(self, adapter_id: int, path: str) -> str:
        return self._inner.load_lora(adapter_id, path)

    def unload_lora(self, adapter_id: int) -> None:
        self._inner.unload_lora(adapter_id)

    def on_failure(self, callback: OnFailure) -> None:
        self._inner.on_failure(callback)

    def sleep_refusal(self) -> str | None:
        return self._inner.sleep_refusal()

    def sleep(self, level: int) -> SleepReport:
        return self._inner.sleep(level)

    def wake(self, tags: Sequence[str]) -> WakeReport:
        return self._inner.wake(tags)

    def memory(self) -> list[MemoryRecord]:
        return self._inner.memory()

    def shutdown(self) -> None:
        self._inner.shutdown()


def profile_steps(args: EngineArgs, row_counts: Sequence[int], sampled: bool = False) -> list[StepParts]:
    """Runs batches of each number of rows on an engine in this process."""
    config = resolve(args)
    executor = TimedExecutor(make_executor(config))
    core = EngineCore(config, executor)
    try:
        return [_profile(core, executor, count, config.model.vocab_size, sampled) for count in row_counts]
    finally:
        core.shutdown()


def _profile(core: EngineCore, executor: TimedExecutor, num_rows: int, vocab_size: int, sampled: bool) -> StepParts:
    draw = random.Random(num_rows)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.8 if sampled else 0.0)
    for index in range(num_rows):
        prompt = [draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        core.add(AddRequest(f"{num_rows}-{index}", prompt, params, time.time()))
    steps = []
    while core.stats().running or core.stats().waiting:
        began = time.perf_counter()
        outputs = core.step()
        ended = time.perf_counter()
        if executor.num_tokens == len(outputs.outputs) == num_rows:
            marks = [began, *executor.marks, ended]
            steps.append([1e3 * (after - before) for before, after in pairwise(marks)])
    steps = steps[len(steps) // 4 :]
    return StepParts(num_rows, len(steps), [statistics.median(part) for part in zip(*steps, strict=True)])
