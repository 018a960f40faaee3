"""POST /v1/completions: raw text or token ids in, text out; up to 64 prompts at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.openai.generation import (
    AnswerHead,
    UsageCount,
    finish_of,
    last_outputs,
    merge,
    sampling_params,
    warning_headers,
)
from inferd.appliance.api.openai.schemas import (
    CompletionAnswer,
    CompletionChoice,
    CompletionRequest,
    parse_request,
)
from inferd.appliance.api.openai.unsupported import COMPLETIONS, refuse_unsupported
from inferd.appliance.api.sse import Exchange, Wire, event
from inferd.appliance.api.state import AppState, state_of
from inferd.appliance.supervisor.served import ServedModel
from inferd.engine.errors import ContextLengthExceeded, InvalidRequest
from inferd.engine.frontend.inputs import PreparedRequest

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    state = state_of(request)
    body = await state.read_json(request)
    ask = parse_request(body, CompletionRequest)
    refuse_unsupported(body, COMPLETIONS)
    head = AnswerHead(f"cmpl-{request.state.request_id}", ask.model)
    return Exchange(lambda wire: _answer(state, ask, head, wire), state.settings.keepalive_s)


async def _answer(state: AppState, ask: CompletionRequest, head: AnswerHead, wire: Wire) -> None:
    prompts = split_prompts(ask.prompt)
    async with state.lease(ask.model) as served:
        max_tokens = DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
        params = sampling_params(ask, max_tokens, served.sampling_defaults)
        try:
            prepared = [
                await served.prepare(prompt, params, request_id=f"{head.id}-{index}", cache_salt=ask.cache_salt)
                for index, prompt in enumerate(prompts)
            ]
        except ContextLengthExceeded as error:
            error.param = "prompt"  # it speaks of messages, as chats have them
            raise
        headers = warning_headers(prepared)
        if ask.stream:
            await wire.stream(_events(served, ask, head, prepared), headers)
        else:
            await wire.json(await _complete(served, ask, head, prepared), headers)


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One prompt or several, each text or token ids. Raises `InvalidRequest`."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty; give at least one token", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise InvalidRequest("prompt mixes token ids with other items", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


def _echoes(served: ServedModel, ask: CompletionRequest, prepared: list[PreparedRequest]) -> list[str]:
    if not ask.echo:
        return [""] * len(prepared)
    return [served.prompt_text(request) for request in prepared]


async def _complete(
    served: ServedModel, ask: CompletionRequest, head: AnswerHead, prepared: list[PreparedRequest]
) -> bytes:
    count = UsageCount(prepared)
    echoes = _echoes(served, ask, prepared)
    choices = []
    outputs = await last_outputs(merge([served.generate(request) for request in prepared]), len(prepared))
    for index, output in enumerate(outputs):
        count.add(index, output)
        completion = output.outputs[0]
        choices.append(CompletionChoice(index, echoes[index] + completion.text, finish_of(completion) or "stop"))
    return msgspec.json.encode(CompletionAnswer(head.id, head.created, head.model, choices, count.usage()))


async def _events(
    served: ServedModel, ask: CompletionRequest, head: AnswerHead, prepared: list[PreparedRequest]
) -> AsyncGenerator[bytes, None]:
    count = UsageCount(prepared)

    def chunk(*choices: CompletionChoice) -> bytes:
        with_usage = ask.continuous_usage or not choices
        usage = count.usage() if with_usage else msgspec.UNSET
        return event(msgspec.json.encode(CompletionAnswer(head.id, head.created, head.model, list(choices), usage)))

    for index, echo in enumerate(_echoes(served, ask, prepared)):
        if echo:
            yield chunk(CompletionChoice(index, echo))
    async with aclosing(merge([served.generate(request) for request in prepared])) as outputs:
        async for index, output in outputs:
            count.add(index, output)
            completion = output.outputs[0]
            finish = finish_of(completion)
            if completion.text or finish is not None:
                yield chunk(CompletionChoice(index, completion.text, finish))
    if ask.include_usage:
        yield chunk()
