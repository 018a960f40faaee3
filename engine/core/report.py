"""What the front is told of one request after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from inferd.engine.logprobs import TokenLogprobs
from inferd.engine.messages import EngineOutput, RequestStart
from inferd.engine.request import Request


def output_of(
    request: Request, new_token_ids: Sequence[int] = (), logprobs: TokenLogprobs | None = None
) -> EngineOutput:
    """`logprobs` are of all tokens sampled, those after a stop among them."""
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=list(new_token_ids),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        error=request.error,
        error_param=request.error_param,
        logprobs=logprobs.cut(0, len(new_token_ids)) if logprobs is not None else None,
        prompt_logprobs=request.prompt_logprobs.take() if request.prompt_logprobs is not None else None,
        start=_start_of(request) if new_token_ids and len(new_token_ids) == request.num_output_tokens else None,
    )


def with_vectors(outputs: list[EngineOutput], pooled: Mapping[str, bytes]) -> list[EngineOutput]:
    return [replace(output, pooled=pooled[output.request_id]) for output in outputs]


def _start_of(request: Request) -> RequestStart | None:
    life = request.life
    if life.first_scheduled_at is None or life.first_token_at is None:
        return None
    return RequestStart(life.queued_at, life.first_scheduled_at, life.first_token_at)
