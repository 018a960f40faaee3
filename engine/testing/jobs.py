"""A workload for comparing engines that differ in how they schedule: jobs, and a driver that runs them to their end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inferd.engine.core.step import EngineCore
from inferd.engine.messages import AddRequest, EngineOutput, FinishReason, SchedulerStats
from inferd.engine.params import SamplingParams


@dataclass(frozen=True)
class Job:
    """One request. It leaves that many steps after it joined, if it is not done by then."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    joins_at_step: int = 0
    leaves_after_steps: int | None = None
    priority: int = 0
    client: str = "local"
    lane: str = "interactive"
    lora: str | None = None


@dataclass
class Run:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    outputs: dict[str, list[EngineOutput]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    stats: SchedulerStats = field(default_factory=SchedulerStats)


def run_jobs(core: EngineCore, jobs: Iterable[Job], *, max_steps: int = 20_000) -> Run:
    """Drive the engine until every job is done; jobs join at their steps, or when there is nothing else to do.

    Raises RuntimeError when it does not come to an end, when a request says something after its last words, and when
    blocks are missing afterwards.
    """
    waiting = sorted(jobs, key=lambda job: job.joins_at_step)
    run = Run(tokens={job.request_id: [] for job in waiting})
    leaving: dict[str, int] = {}
    for step in range(max_steps):
        while waiting and (waiting[0].joins_at_step <= step or not core.has_work):
            job = waiting.pop(0)
            core.add(_request(job))
            if job.leaves_after_steps is not None:
                leaving[job.request_id] = step + job.leaves_after_steps
        if not core.has_work:
            break
        gone = [name for name, at_step in leaving.items() if at_step <= step and name not in run.reasons]
        for output in core.step(lambda gone=gone: gone).outputs:  # type: ignore[misc]
            if output.request_id in run.reasons:
                raise RuntimeError(f"{output.request_id} spoke after it had ended")
            run.tokens[output.request_id] += output.new_token_ids
            run.outputs.setdefault(output.request_id, []).append(output)
            if output.finish_reason is not None:
                run.reasons[output.request_id] = output.finish_reason
    run.stats = core.stats()
    if run.reasons.keys() != run.tokens.keys() or core.has_work:
        raise RuntimeError(f"the engine did not come to an end in {max_steps} steps: {run.stats}")
    if run.stats.blocks_free != run.stats.blocks_total:
        raise RuntimeError(f"blocks are missing: {run.stats}")
    return run


def _request(job: Job) -> AddRequest:
    fields = dict(priority=job.priority, client=job.client, lane=job.lane, lora=job.lora)
    return AddRequest(job.request_id, list(job.prompt), job.params, 0.0, **fields)  # type: ignore[arg-type]
