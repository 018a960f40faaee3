"""What chat and completions do alike: parameters, several streams as one, finish reasons, usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from inferd.appliance.api.openai.schemas import (
    CompletionTokensDetails,
    Finish,
    GenerationRequest,
    PromptTokensDetails,
    Usage,
)
from inferd.appliance.api.openai.structured import structured_output
from inferd.engine.errors import InvalidRequest, NotSupported
from inferd.engine.frontend.inputs import PreparedRequest
from inferd.engine.frontend.outputs import CompletionOutput, RequestOutput
from inferd.engine.messages import FinishReason
from inferd.engine.params import MAX_LOGPROBS, OutputKind, RepetitionDetection, SamplingParams

FINISH: Mapping[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "stop",  # strict clients know no more than these two
}
T = TypeVar("T")
MAX_CHOICES = 16
WARNING_HEADER = "x-inferd-warning"
_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


@dataclass(frozen=True)
class AnswerHead:
    """What every chunk of one answer repeats."""

    id: str
    model: str  # as the client named it
    created: int = field(default_factory=lambda: int(time.time()))


def sampling_params(
    ask: GenerationRequest,
    max_tokens: int | None,
    defaults: Mapping[str, Any],
    logprobs: int | None = None,
) -> SamplingParams:
    """What the request says wins over what the model's authors recommend. Raises `InvalidRequest`."""
    asked = {name: value for name in _PLAIN_FIELDS if (value := getattr(ask, name)) is not None}
    if ask.stop is not None:
        asked["stop"] = [ask.stop] if isinstance(ask.stop, str) else ask.stop
    if ask.logit_bias:
        asked["logit_bias"] = {_token_id(key): bias for key, bias in ask.logit_bias.items()}
    if ask.repetition_detection is not None:
        asked["repetition_detection"] = RepetitionDetection(**msgspec.structs.asdict(ask.repetition_detection))
    if ask.prompt_logprobs is not None:
        if ask.stream:
            raise InvalidRequest("prompt_logprobs needs stream: false", param="prompt_logprobs")
        check_num_logprobs("prompt_logprobs", ask.prompt_logprobs)
    if (form := structured_output(ask)) is not None:
        asked["structured_output"] = form
    kind = OutputKind.DELTA if ask.stream else OutputKind.FINAL_ONLY
    values = {**defaults, **asked, "n": _num_choices(ask), "logprobs": logprobs}
    return SamplingParams(**values, max_tokens=max_tokens, output_kind=kind)


def check_num_logprobs(name: str, count: int) -> None:
    """The whole vocabulary is nothing to send over a network."""
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be between 0 and {MAX_LOGPROBS}, got {count}", param=name)


def _num_choices(ask: GenerationRequest) -> int:
    wanted = 1 if ask.n is None else ask.n
    if not 1 <= wanted <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}, got {wanted}", param="n")
    if ask.best_of is not None and ask.best_of != wanted:
        raise NotSupported(
            f"best_of: {ask.best_of} is not supported; leave it out or send n, {wanted}", param="best_of"
        )
    return wanted


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise InvalidRequest(f"logit_bias: {key[:40]!r} is no token id", param="logit_bias")
    return int(key)


def finish_of(completion: CompletionOutput) -> Finish | None:
    return FINISH[completion.finish_reason] if completion.finish_reason is not None else None


class UsageCount:
    """Tokens of one answer so far; each prompt counts once."""

    def __init__(self, requests: Sequence[PreparedRequest]) -> None:
        self._prompt_tokens = sum(len(request.add.prompt_token_ids) for request in requests)
        self._output_tokens = [0] * len(requests)
        self._cached_tokens = [0] * len(requests)

    def add(self, index: int, output: RequestOutput) -> None:
        self._output_tokens[index] = output.num_output_tokens
        self._cached_tokens[index] = output.num_cached_tokens

    def usage(self, reasoning_tokens: int | None = None) -> Usage:
        """`reasoning_tokens` are among the output's; None where that is not told."""
        output_tokens = sum(self._output_tokens)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=output_tokens,
            total_tokens=self._prompt_tokens + output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens)),
            completion_tokens_details=(
                msgspec.UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
            ),
        )


def warning_headers(requests: Sequence[PreparedRequest], more: Sequence[str] = ()) -> dict[str, str]:
    warnings = dict.fromkeys([*(warning for request in requests for warning in request.warnings), *more])
    return {WARNING_HEADER: "; ".join(warnings)} if warnings else {}


async def once_accepted(outputs: AsyncGenerator[T, None], params: SamplingParams) -> AsyncGenerator[T, None]:
    """The same outputs; of a request under a grammar, when the first is there.

    Only then is it sure that the grammar can be enforced, and until then a refusal still gets a status of its own.
    """
    if params.structured_output is None:
        return outputs
    return _with_first(await anext(outputs), outputs)


async def _with_first(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(rest):
        yield first
        async for output in rest:
            yield output


async def merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams as they come, each with its stream's index. The first error ends all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_feed(queue, index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None],
    index: int,
    stream: AsyncGenerator[RequestOutput, None],
) -> None:
    try:
        async with aclosing(stream):
            async for output in stream:
                await queue.put((index, output))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


async def last_outputs(outputs: AsyncIterator[tuple[int, RequestOutput]], num_streams: int) -> list[RequestOutput]:
    """The final output of every stream, in their order."""
    last: dict[int, RequestOutput] = {}
    async for index, output in outputs:
        last[index] = output
    return [last[index] for index in range(num_streams)]
