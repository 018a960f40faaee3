"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.openai.generation import (
    AnswerHead,
    UsageCount,
    check_num_logprobs,
    finish_of,
    last_outputs,
    merge,
    once_accepted,
    sampling_params,
    warning_headers,
)
from inferd.appliance.api.openai.logprobs import chat_logprobs, prompt_logprobs
from inferd.appliance.api.openai.schemas import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    Delta,
    parse_request,
)
from inferd.appliance.api.openai.structured import blamed_on, field_of
from inferd.appliance.api.openai.unsupported import CHAT, refuse_unsupported, template_options
from inferd.appliance.api.sse import Exchange, Wire, event
from inferd.appliance.api.state import state_of
from inferd.engine.errors import InvalidRequest
from inferd.engine.frontend.inputs import PreparedRequest, TokensPrompt
from inferd.engine.frontend.outputs import CompletionOutput, RequestOutput

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    state = state_of(request)
    body = await state.read_json(request)
    ask = parse_request(body, ChatRequest)
    refuse_unsupported(body, CHAT)
    head = AnswerHead(f"chatcmpl-{request.state.request_id}", ask.model)
    return Exchange(lambda wire: _answer(request, ask, head, wire), state.settings.keepalive_s)


async def _answer(request: Request, ask: ChatRequest, head: AnswerHead, wire: Wire) -> None:
    options = template_options(ask.chat_template_kwargs)
    async with state_of(request).serve(request, ask.model, "chat") as (served, live), AsyncExitStack() as stack:
        stack.enter_context(blamed_on(field_of(ask)))
        token_ids = await served.chat_token_ids(ask.messages, options)
        max_tokens = ask.max_tokens if ask.max_completion_tokens is None else ask.max_completion_tokens
        params = sampling_params(
            ask, max_tokens, served.sampling_defaults, _num_logprobs(ask), served.reasoning_token_ids
        )
        prepared = await served.prepare(
            TokensPrompt(token_ids), params, request_id=head.id, cache_salt=ask.cache_salt, live=live
        )
        (outputs,) = served.begin(live, [prepared])
        headers = warning_headers([prepared])
        if ask.stream:
            outputs = await once_accepted(outputs, params)
            await stack.enter_async_context(aclosing(outputs))
            await wire.stream(_events(outputs, ask, head, prepared), headers)
        else:
            await wire.json(await _complete(outputs, ask, head, prepared), headers)


def _num_logprobs(ask: ChatRequest) -> int | None:
    if ask.top_logprobs is not None:
        check_num_logprobs("top_logprobs", ask.top_logprobs)
        if ask.top_logprobs and not ask.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return (ask.top_logprobs or 0) if ask.logprobs else None


def _logprobs(ask: ChatRequest, completion: CompletionOutput) -> ChatLogprobs | msgspec.UnsetType | None:
    if not ask.logprobs:
        return msgspec.UNSET
    return chat_logprobs(completion, ask.top_logprobs or 0, stop_is_shown=bool(ask.include_stop_str_in_output))


async def _complete(
    outputs: AsyncGenerator[RequestOutput, None], ask: ChatRequest, head: AnswerHead, prepared: PreparedRequest
) -> bytes:
    count = UsageCount([prepared])
    (output,) = await last_outputs(merge([outputs]), 1)
    count.add(0, output)
    choices = [
        ChatChoice(
            completion.index,
            AnswerMessage(completion.text),
            finish_of(completion) or "stop",
            _logprobs(ask, completion),
        )
        for completion in output.outputs
    ]
    answer = ChatAnswer(head.id, head.created, head.model, choices, count.usage())
    if output.prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
    return msgspec.json.encode(answer)


async def _events(
    outputs: AsyncGenerator[RequestOutput, None], ask: ChatRequest, head: AnswerHead, prepared: PreparedRequest
) -> AsyncGenerator[bytes, None]:
    count = UsageCount([prepared])

    def chunk(*choices: ChatChunkChoice) -> bytes:
        with_usage = ask.continuous_usage or not choices
        usage = count.usage() if with_usage else msgspec.UNSET
        return event(msgspec.json.encode(ChatChunk(head.id, head.created, head.model, list(choices), usage)))

    for index in range(prepared.add.params.n):
        yield chunk(ChatChunkChoice(index, Delta(role="assistant", content="")))
    async for output in outputs:
        count.add(0, output)
        for completion in output.outputs:
            logprobs = _logprobs(ask, completion)
            if completion.text or logprobs:  # text may be held back while its tokens are known
                yield chunk(ChatChunkChoice(completion.index, Delta(content=completion.text), None, logprobs))
            if (finish := finish_of(completion)) is not None:
                yield chunk(ChatChunkChoice(completion.index, Delta(), finish))
    if ask.include_usage:
        yield chunk()
