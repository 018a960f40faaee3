"""POST /v1/chat/completions."""

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
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatRequest,
    Delta,
    parse_request,
)
from inferd.appliance.api.openai.unsupported import CHAT, refuse_unsupported, template_options
from inferd.appliance.api.sse import Exchange, Wire, event
from inferd.appliance.api.state import AppState, state_of
from inferd.appliance.supervisor.served import ServedModel
from inferd.engine.frontend.inputs import PreparedRequest, TokensPrompt

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    state = state_of(request)
    body = await state.read_json(request)
    ask = parse_request(body, ChatRequest)
    refuse_unsupported(body, CHAT)
    head = AnswerHead(f"chatcmpl-{request.state.request_id}", ask.model)
    return Exchange(lambda wire: _answer(state, ask, head, wire), state.settings.keepalive_s)


async def _answer(state: AppState, ask: ChatRequest, head: AnswerHead, wire: Wire) -> None:
    options = template_options(ask.chat_template_kwargs)
    async with state.lease(ask.model) as served:
        token_ids = await served.chat_token_ids(ask.messages, options)
        max_tokens = ask.max_tokens if ask.max_completion_tokens is None else ask.max_completion_tokens
        params = sampling_params(ask, max_tokens, served.sampling_defaults)
        prepared = await served.prepare(TokensPrompt(token_ids), params, request_id=head.id, cache_salt=ask.cache_salt)
        headers = warning_headers([prepared])
        if ask.stream:
            await wire.stream(_events(served, ask, head, prepared), headers)
        else:
            await wire.json(await _complete(served, head, prepared), headers)


async def _complete(served: ServedModel, head: AnswerHead, prepared: PreparedRequest) -> bytes:
    count = UsageCount([prepared])
    (output,) = await last_outputs(merge([served.generate(prepared)]), 1)
    count.add(0, output)
    completion = output.outputs[0]
    choice = ChatChoice(0, AnswerMessage(completion.text), finish_of(completion) or "stop")
    return msgspec.json.encode(ChatAnswer(head.id, head.created, head.model, [choice], count.usage()))


async def _events(
    served: ServedModel, ask: ChatRequest, head: AnswerHead, prepared: PreparedRequest
) -> AsyncGenerator[bytes, None]:
    count = UsageCount([prepared])

    def chunk(*choices: ChatChunkChoice) -> bytes:
        with_usage = ask.continuous_usage or not choices
        usage = count.usage() if with_usage else msgspec.UNSET
        return event(msgspec.json.encode(ChatChunk(head.id, head.created, head.model, list(choices), usage)))

    yield chunk(ChatChunkChoice(0, Delta(role="assistant", content="")))
    async with aclosing(served.generate(prepared)) as outputs:
        async for output in outputs:
            count.add(0, output)
            completion = output.outputs[0]
            if completion.text:
                yield chunk(ChatChunkChoice(0, Delta(content=completion.text)))
            if (finish := finish_of(completion)) is not None:
                yield chunk(ChatChunkChoice(0, Delta(), finish))
    if ask.include_usage:
        yield chunk()
