"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.openai.answers import deltas_of, finish_of_chat, message_of, num_reasoning_tokens
from inferd.appliance.api.openai.generation import (
    AnswerHead,
    UsageCount,
    check_num_logprobs,
    last_outputs,
    merge,
    once_accepted,
    sampling_params,
    warning_headers,
)
from inferd.appliance.api.openai.logprobs import chat_logprobs, prompt_logprobs
from inferd.appliance.api.openai.schemas import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    Delta,
    Finish,
    Usage,
    parse_request,
)
from inferd.appliance.api.openai.structured import blamed_on, field_of, structured_output
from inferd.appliance.api.openai.tools import tool_use
from inferd.appliance.api.openai.unsupported import CHAT, refuse_unsupported, template_options
from inferd.appliance.api.sse import Exchange, Wire, event
from inferd.appliance.api.state import state_of
from inferd.appliance.chat.answer import AnswerPlan, AnswerReader
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
    variables = template_options(ask.chat_template_kwargs, ask.reasoning_effort)
    use, form = tool_use(ask), structured_output(ask)
    async with state_of(request).serve(request, ask.model, "chat") as (served, live), AsyncExitStack() as stack:
        stack.enter_context(blamed_on("tools" if form is None and use is not None else field_of(ask)))
        token_ids = await served.chat_token_ids(ask.messages, variables, use.tools if use is not None else ())
        plan = served.answers.plan(token_ids, use, form)
        max_tokens = ask.max_tokens if ask.max_completion_tokens is None else ask.max_completion_tokens
        params = msgspec.structs.replace(
            sampling_params(ask, max_tokens, served.sampling_defaults, _num_logprobs(ask)),
            structured_output=plan.structured_output,
            shown_special_token_ids=plan.shown_special_token_ids,
        )
        prepared = await served.prepare(
            TokensPrompt(token_ids), params, request_id=head.id, cache_salt=ask.cache_salt, live=live
        )
        live.warnings = (*live.warnings, *plan.warnings)
        (outputs,) = served.begin(live, [prepared])
        headers = warning_headers([prepared], plan.warnings)
        answer = _Answer(ask, head, prepared, plan)
        if ask.stream:
            outputs = await once_accepted(outputs, params)
            await stack.enter_async_context(aclosing(outputs))
            await wire.stream(answer.events(outputs), headers)
        else:
            await wire.json(await answer.whole(outputs), headers)


def _num_logprobs(ask: ChatRequest) -> int | None:
    if ask.top_logprobs is not None:
        check_num_logprobs("top_logprobs", ask.top_logprobs)
        if ask.top_logprobs and not ask.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return (ask.top_logprobs or 0) if ask.logprobs else None


class _Answer:
    """All choices of one request, each with a reader of its own."""

    def __init__(self, ask: ChatRequest, head: AnswerHead, prepared: PreparedRequest, plan: AnswerPlan) -> None:
        self._ask = ask
        self._head = head
        self._count = UsageCount([prepared])
        self._readers = [plan.reader() for _ in range(prepared.add.params.n)]
        self._named = plan.use is not None and plan.use.named
        self._with_reasoning = ask.include_reasoning is not False

    async def whole(self, outputs: AsyncGenerator[RequestOutput, None]) -> bytes:
        (output,) = await last_outputs(merge([outputs]), 1)
        self._count.add(0, output)
        choices = [self._choice(completion) for completion in output.outputs]
        answer = ChatAnswer(self._head.id, self._head.created, self._head.model, choices, self._usage())
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return msgspec.json.encode(answer)

    async def events(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[bytes, None]:
        for index in range(len(self._readers)):
            yield self._chunk(ChatChunkChoice(index, Delta(role="assistant", content="")))
        async for output in outputs:
            self._count.add(0, output)
            for completion in output.outputs:
                for piece in self._pieces(completion):
                    yield self._chunk(piece)
        if self._ask.include_usage:
            yield self._chunk()

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        reader = self._readers[completion.index]
        message = message_of(reader.read(completion), with_reasoning=self._with_reasoning)
        return ChatChoice(completion.index, message, self._finish(reader) or "stop", self._logprobs(completion))

    def _pieces(self, completion: CompletionOutput) -> list[ChatChunkChoice]:
        """Log probabilities go with the first piece of what their tokens made, or alone while that is held back."""
        reader, index = self._readers[completion.index], completion.index
        deltas = deltas_of(reader.read(completion), with_reasoning=self._with_reasoning)
        logprobs = self._logprobs(completion)
        if logprobs and not deltas:
            deltas = [Delta(content="")]
        pieces = [ChatChunkChoice(index, delta, None, msgspec.UNSET) for delta in deltas]
        if pieces:
            pieces[0].logprobs = logprobs
        if (finish := self._finish(reader)) is not None:
            pieces.append(ChatChunkChoice(index, Delta(), finish))
        return pieces

    def _finish(self, reader: AnswerReader) -> Finish | None:
        return finish_of_chat(reader, named=self._named)

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | msgspec.UnsetType | None:
        """Of all tokens, those of reasoning and calls among them."""
        if not self._ask.logprobs:
            return msgspec.UNSET
        shown = bool(self._ask.include_stop_str_in_output)
        return chat_logprobs(completion, self._ask.top_logprobs or 0, stop_is_shown=shown)

    def _chunk(self, *choices: ChatChunkChoice) -> bytes:
        usage = self._usage() if self._ask.continuous_usage or not choices else msgspec.UNSET
        chunk = ChatChunk(self._head.id, self._head.created, self._head.model, list(choices), usage)
        return event(msgspec.json.encode(chunk))

    def _usage(self) -> Usage:
        return self._count.usage(num_reasoning_tokens(self._readers))
