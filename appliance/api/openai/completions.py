"""POST /v1/completions: raw text or token ids in, text out; up to 64 prompts at once."""

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
from inferd.appliance.api.openai.logprobs import LegacyLogprobs, PromptAlternatives, prompt_logprobs
from inferd.appliance.api.openai.schemas import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    parse_request,
)
from inferd.appliance.api.openai.structured import blamed_on, field_of
from inferd.appliance.api.openai.unsupported import COMPLETIONS, refuse_unsupported
from inferd.appliance.api.sse import Exchange, Wire, event
from inferd.appliance.api.state import state_of
from inferd.appliance.supervisor.served import ServedModel
from inferd.engine.errors import ContextLengthExceeded, InvalidRequest
from inferd.engine.frontend.inputs import PreparedRequest
from inferd.engine.frontend.outputs import CompletionOutput, RequestOutput

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
    return Exchange(lambda wire: _answer(request, ask, head, wire), state.settings.keepalive_s)


async def _answer(request: Request, ask: CompletionRequest, head: AnswerHead, wire: Wire) -> None:
    prompts = split_prompts(ask.prompt)
    serving = state_of(request).serve(request, ask.model, "completions")
    async with serving as (served, live), AsyncExitStack() as stack:
        stack.enter_context(blamed_on(field_of(ask)))
        max_tokens = DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
        params = sampling_params(ask, max_tokens, served.sampling_defaults, num_logprobs(ask))
        if ask.echo and params.logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
        try:
            prepared = [
                await served.prepare(
                    prompt, params, request_id=f"{head.id}-{index}", cache_salt=ask.cache_salt, live=live
                )
                for index, prompt in enumerate(prompts)
            ]
        except ContextLengthExceeded as error:
            error.param = "prompt"  # it speaks of messages, as chats have them
            raise
        headers = warning_headers(prepared)
        merged = merge(served.begin(live, prepared))
        if ask.stream:
            outputs = await stack.enter_async_context(aclosing(await once_accepted(merged, params)))
            await wire.stream(_events(served, outputs, ask, head, prepared), headers)
        else:
            await wire.json(await _complete(served, merged, ask, head, prepared), headers)


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


def num_logprobs(ask: CompletionRequest) -> int | None:
    """Raises `InvalidRequest`."""
    if ask.logprobs is None or ask.logprobs is False:
        return None
    if ask.logprobs is True:
        raise InvalidRequest("logprobs: true is for chats; here it is how many", param="logprobs")
    check_num_logprobs("logprobs", ask.logprobs)
    return ask.logprobs


class _Pieces:
    """Turns the outputs of one prompt into choices, whole ones or pieces of a stream."""

    def __init__(self, served: ServedModel, ask: CompletionRequest, index: int, prepared: PreparedRequest) -> None:
        num_choices, num_top = prepared.add.params.n, num_logprobs(ask)
        self._ask = ask
        self._first_index = index * num_choices
        self._echo = served.prompt_text(prepared) if ask.echo else ""
        self._first_token = served.token_text(prepared.add.prompt_token_ids[0])
        self._legacy = None if num_top is None else [LegacyLogprobs(num_top) for _ in range(num_choices)]
        self._to_echo = set(range(num_choices)) if ask.echo else set()
        self._prompt_logprobs: PromptAlternatives | None = None  # known with the first choice's first token
        self._held: list[CompletionOutput] = []

    def choices(self, output: RequestOutput) -> list[CompletionChoice]:
        """Those that have something new. The prompt is echoed in front of the first piece of each choice."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        self._held += output.outputs
        if self._to_echo and self._legacy is not None and self._prompt_logprobs is None:
            return []
        completions, self._held = self._held, []
        pieces = [self._piece(completion) for completion in completions]
        return [piece for piece in pieces if piece.text or piece.finish_reason or piece.logprobs]

    def _piece(self, completion: CompletionOutput) -> CompletionChoice:
        is_first = completion.index in self._to_echo
        self._to_echo.discard(completion.index)
        choice = CompletionChoice(
            self._first_index + completion.index,
            (self._echo if is_first else "") + completion.text,
            finish_of(completion),
            self._logprobs(completion, with_prompt=is_first),
        )
        if self._ask.prompt_logprobs is not None and self._prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_logprobs)
        return choice

    def _logprobs(self, completion: CompletionOutput, *, with_prompt: bool) -> CompletionLogprobs | None:
        if self._legacy is None:
            return None
        reader = self._legacy[completion.index]
        if with_prompt:
            reader.echo(self._first_token, self._prompt_logprobs or [None])
        return reader.take(completion.logprobs or [])


async def _complete(
    served: ServedModel,
    merged: AsyncGenerator[tuple[int, RequestOutput], None],
    ask: CompletionRequest,
    head: AnswerHead,
    prepared: list[PreparedRequest],
) -> bytes:
    count = UsageCount(prepared)
    choices = []
    outputs = await last_outputs(merged, len(prepared))
    for index, output in enumerate(outputs):
        count.add(index, output)
        choices += _Pieces(served, ask, index, prepared[index]).choices(output)
    return msgspec.json.encode(CompletionAnswer(head.id, head.created, head.model, choices, count.usage()))


async def _events(
    served: ServedModel,
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
    ask: CompletionRequest,
    head: AnswerHead,
    prepared: list[PreparedRequest],
) -> AsyncGenerator[bytes, None]:
    count = UsageCount(prepared)
    pieces = [_Pieces(served, ask, index, request) for index, request in enumerate(prepared)]

    def chunk(*choices: CompletionChoice) -> bytes:
        with_usage = ask.continuous_usage or not choices
        usage = count.usage() if with_usage else msgspec.UNSET
        return event(msgspec.json.encode(CompletionAnswer(head.id, head.created, head.model, list(choices), usage)))

    async for index, output in outputs:
        count.add(index, output)
        for choice in pieces[index].choices(output):
            yield chunk(choice)
    if ask.include_usage:
        yield chunk()
