"""Times the GPU suite on one engine."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from inferd.engine.bench.gpu_suite import GpuRow
from inferd.engine.bench.workloads import Workload
from inferd.engine.config import EngineArgs
from inferd.engine.core.client import EngineCoreClient, InprocClient, MPClient
from inferd.engine.frontend.llm_engine import LLMEngine
from inferd.engine.params import OutputKind


@dataclass(frozen=True)
class GpuResult:
    name: str
    seconds: float  # of the best round
    tokens_per_s: float
    rounds: list[float]  # tokens/s of each


class TimedEngine:
    """An engine without a tokenizer, in a process of its own or in this one."""

    def __init__(self, args: EngineArgs, *, in_process: bool) -> None:
        began = time.perf_counter()
        self._client: EngineCoreClient = InprocClient(args) if in_process else MPClient(args, _run_dir())
        self.ready_s = time.perf_counter() - began
        self.ready = self._client.ready
        self._engine = LLMEngine(self._client, None)

    def shutdown(self) -> None:
        self._engine.shutdown()

    def time(self, row: GpuRow, round_: int) -> tuple[float, float]:
        """Seconds, and tokens per second of what the row counts, with prompts that were never seen."""
        workload = row.workload
        prompts = workload.prompts(random.Random(f"{row.name} {round_}"), self.ready.vocab_size)
        if workload.primed:
            self._run([[*prompts[0][: workload.shared_tokens], 0]], replace_output(workload, 1))
        seconds, decode_s, decode_tokens = self._run(prompts, workload)
        if row.counts == "decode":
            return decode_s, decode_tokens / decode_s
        counted = workload.num_requests * workload.prompt_tokens if row.counts == "prompt" else None
        return seconds, (counted or workload.total_output_tokens) / seconds

    def _run(self, prompts: list[list[int]], workload: Workload) -> tuple[float, float, int]:
        """Seconds in all; seconds and tokens from the moment when every request has its first token."""
        params = replace(workload.params(), output_kind=OutputKind.DELTA)
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self._engine.add_request(prompt, params, request_id=str(index))
        started: set[str] = set()
        total = before = 0
        all_started = began
        while self._engine.num_unfinished:
            outputs = self._engine.step()
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(f"{workload.name}: request {output.request_id} failed: {output.error}")
                total += len(output.outputs[0].token_ids)
            if len(started) < len(prompts):
                started.update(output.request_id for output in outputs)
                all_started, before = time.perf_counter(), total
        ended = time.perf_counter()
        if total != workload.output_tokens * len(prompts):
            raise RuntimeError(f"{workload.name}: {total} tokens came out, not {workload.output_tokens} a request")
        return ended - began, ended - all_started, total - before


def replace_output(workload: Workload, output_tokens: int) -> Workload:
    return Workload(workload.name, workload.num_requests, workload.shared_tokens, workload.own_tokens, output_tokens)


def measure_rows(
    engine: TimedEngine, rows: Sequence[GpuRow], num_rounds: int, progress: Callable[[str], None]
) -> list[GpuResult]:
    """All rows once, then all of them again: what a first round compiles or touches is not in the best."""
    times: dict[str, list[tuple[float, float]]] = {row.name: [] for row in rows}
    for round_ in range(num_rounds):
        for row in rows:
            seconds, speed = engine.time(row, round_)
            times[row.name].append((seconds, speed))
            progress(f"{row.name}: {speed:.1f} tok/s, {seconds:.2f} s")
    results = []
    for name, rounds in times.items():
        seconds, speed = max(rounds, key=lambda one: one[1])
        results.append(GpuResult(name, seconds, speed, [one[1] for one in rounds]))
    return results


def _run_dir() -> Path:
    return Path(tempfile.gettempdir())
