"""The record of one step."""

from __future__ import annotations

from collections.abc import Mapping

from inferd.engine.core.pipeline import Landed
from inferd.engine.insight.records import StepRecord, StepShare, StepTokens
from inferd.engine.messages import SchedulerStats
from inferd.engine.request import Request


def draw_step(
    landed: Landed, requests: Mapping[str, Request], stats: SchedulerStats, *, budget: int, evictions: int
) -> StepRecord:
    """`requests`: those of the step that are still known; `stats`: after it. `evictions`: since the last step told."""
    output, graph = landed.output, landed.result.graph
    total = max(stats.blocks_total, 1)
    return StepRecord(
        step=output.step,
        at=landed.at,
        duration_ms=round(landed.duration_s * 1000, 3),
        tokens=_tokens(landed, requests),
        budget=budget,
        requests=[StepShare(name, tokens) for name, tokens in output.num_scheduled_tokens.items()],
        graph_mode=graph.mode if graph is not None else "",
        graph_size=graph.size if graph is not None else 0,
        preempted=list(output.preempted_ids),
        running=stats.running,
        waiting=stats.waiting,
        kv_used=round((stats.blocks_total - stats.blocks_free) / total, 4),
        kv_cached=round(stats.blocks_cached / total, 4),
        evictions=evictions,
    )


def _tokens(landed: Landed, requests: Mapping[str, Request]) -> StepTokens:
    """A request that has only its newest token to compute decodes; what it computes beside that are drafts."""
    output = landed.output
    scheduled, drafts = output.num_scheduled_tokens, output.drafts
    prefill = sum(scheduled[new.request_id] for new in output.new)
    decode = 0
    for request_id, num_computed in zip(output.known.request_ids, output.known.num_computed_tokens, strict=True):
        request = requests.get(request_id)
        num_tokens = scheduled[request_id] - len(drafts.get(request_id, ()))
        if num_tokens > 1 or (request is not None and num_computed < request.num_prompt_tokens):
            prefill += num_tokens
        else:
            decode += num_tokens
    return StepTokens(prefill, decode, sum(map(len, drafts.values())))
