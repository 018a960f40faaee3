"""The record of one request, and the short way to what has changed in one that goes on decoding."""

from __future__ import annotations

from inferd.engine.core.insight.reasons import Why
from inferd.engine.core.insight.relief import time_to_end_s
from inferd.engine.core.insight.scene import Scene, is_decoding
from inferd.engine.insight.records import Fields, RequestRecord, RequestState
from inferd.engine.request import Request, RequestStatus


def draw(request: Request, scene: Scene, *, kv_blocks: int, context_limit: int) -> RequestRecord:
    life, why = request.life, scene.why(request)
    num_output_tokens = request.num_output_tokens
    speed = life.tokens_per_s(num_output_tokens)
    return RequestRecord(
        id=request.request_id,
        name=request.name,
        client=request.client,
        lane=request.lane,
        state=scene.state(request),
        reason=why.reason if why is not None else None,
        reason_text=why.text if why is not None else "",
        blocked_by=why.blocked_by if why is not None else None,
        position=scene.positions.get(request.request_id),
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        computed_tokens=request.num_computed_tokens,
        output_tokens=num_output_tokens,
        max_tokens=request.max_tokens,
        context_limit=context_limit,
        diverged_at=life.divergence.at if life.divergence is not None else None,
        diverged_from=life.divergence.request_id if life.divergence is not None else None,
        salted=request.cache_salt is not None,
        adapter=request.lora.name if request.lora is not None else None,
        kv_blocks=kv_blocks,
        kv_blocks_peak=life.num_blocks_peak,
        preemptions=request.num_preemptions,
        batch_size=0 if request.is_finished else scene.batch_size(request),
        spec_accepted=life.num_accepted,
        spec_drafted=life.num_drafted,
        tokens_per_s=round(speed, 1),
        priority=request.priority,
        arrived_at=request.arrival_time_s,
        admitted_at=life.queued_at,
        first_scheduled_at=life.first_scheduled_at,
        first_token_at=life.first_token_at,
        last_token_at=life.last_token_at,
        finished_at=life.finished_at,
        eta_s=_eta_s(request, why),
        finish_reason=request.finish_reason.value if request.finish_reason is not None else None,
        error=request.error,
    )


def decodes_on(sent: RequestRecord, request: Request) -> bool:
    """Whether `catch_up` says all there is to say: it decoded when `sent` was drawn, and has done nothing else since.

    For a request that nothing halts, and that is in the last step.
    """
    return (
        sent.state is RequestState.DECODE
        and sent.reason is None
        and request.status is RequestStatus.RUNNING
        and sent.preemptions == request.num_preemptions
        and sent.priority == request.priority
        and sent.first_token_at == request.life.first_token_at
        and is_decoding(request)
    )


def catch_up(sent: RequestRecord, request: Request, *, kv_blocks: int, batch_size: int) -> Fields:
    """The fields in which `sent` is behind; it has them afterwards. The same as drawing anew, and comparing."""
    life, num_output_tokens = request.life, request.num_output_tokens
    fields: Fields = {"id": sent.id}
    if sent.computed_tokens != (computed := request.num_computed_tokens):
        sent.computed_tokens = fields["computed_tokens"] = computed
    if sent.output_tokens != num_output_tokens:
        sent.output_tokens = fields["output_tokens"] = num_output_tokens
    if sent.last_token_at != life.last_token_at:
        sent.last_token_at = fields["last_token_at"] = life.last_token_at
    if sent.kv_blocks != kv_blocks:
        sent.kv_blocks = fields["kv_blocks"] = kv_blocks
    if sent.kv_blocks_peak != life.num_blocks_peak:
        sent.kv_blocks_peak = fields["kv_blocks_peak"] = life.num_blocks_peak
    if sent.batch_size != batch_size:
        sent.batch_size = fields["batch_size"] = batch_size
    if sent.spec_drafted != life.num_drafted:
        sent.spec_drafted = fields["spec_drafted"] = life.num_drafted
    if sent.spec_accepted != life.num_accepted:
        sent.spec_accepted = fields["spec_accepted"] = life.num_accepted
    speed = life.tokens_per_s(num_output_tokens)
    if sent.tokens_per_s != (rounded := round(speed, 1)):
        sent.tokens_per_s = fields["tokens_per_s"] = rounded
    eta_s = round((request.max_tokens - num_output_tokens) / speed, 1) if speed > 0 else None
    if sent.eta_s != eta_s:
        sent.eta_s = fields["eta_s"] = eta_s
    return fields if len(fields) > 1 else {}


def _eta_s(request: Request, why: Why | None) -> float | None:
    if why is not None:
        return None if why.eta_s is None else round(why.eta_s, 1)
    if request.status is not RequestStatus.RUNNING:
        return None
    eta_s = time_to_end_s(request)
    return None if eta_s is None else round(eta_s, 1)
