"""When a request ends by what it generated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inferd.engine.core.grammar import GrammarManager
from inferd.engine.core.repetition import ends_in_repetition
from inferd.engine.messages import FinishReason
from inferd.engine.request import Request

Stop = tuple[FinishReason, int | None]  # why, and the stop token where it was one


def append_tokens(
    request: Request,
    sampled: Sequence[int],
    eos_token_ids: Collection[int],
    max_model_len: int,
    grammar: GrammarManager | None = None,
) -> tuple[int, Stop | None]:
    """Append tokens up to the first that ends the request; how many that were, and why it ended.

    A token that its grammar refuses ends it with an error, and is not appended.
    """
    for count, token_id in enumerate(sampled, 1):
        if grammar is not None:
            request.error = grammar.accept(request, token_id)
            if request.error is not None:
                return count - 1, (FinishReason.ERROR, None)
        request.append_token(token_id)
        if grammar is not None and grammar.has_ended(request):
            return count, (FinishReason.STOP, None)
        stop = find_stop(request, token_id, eos_token_ids, max_model_len)
        if stop is not None:
            return count, stop
    return len(sampled), None


def find_stop(request: Request, token_id: int, eos_token_ids: Collection[int], max_model_len: int) -> Stop | None:
    """Whether the request ends with `token_id`, its newest token, and why."""
    params, num_tokens = request.params, len(request.token_ids)
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output_tokens >= request.max_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    detection = params.repetition_detection
    if detection is not None and ends_in_repetition(request.token_ids, num_output_tokens, detection):
        return FinishReason.REPETITION, None
    return None
