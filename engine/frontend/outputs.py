"""What a caller reads: text, token ids, log probabilities, finish reasons, times."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from inferd.engine.errors import EngineError, InvalidRequest, RequestFailed
from inferd.engine.frontend.logprobs import TokenAlternatives
from inferd.engine.messages import FinishReason
from inferd.engine.params import OutputKind


@dataclass(slots=True)
class RequestTimes:
    """Monotonic clock of this process, except `arrival_wall_s`."""

    arrival_wall_s: float
    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """`text`, `token_ids` and `logprobs` are all so far, or what is new with `OutputKind.DELTA`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string, unless it was the model's end of sequence
    logprobs: list[TokenAlternatives] | None = None  # one a token id; None when they were not asked for


@dataclass(slots=True)
class RequestOutput:
    request_id: str  # as the caller named it
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # by index; with `OutputKind.DELTA` those that have something new
    finished: bool  # all n of them
    num_cached_tokens: int
    num_output_tokens: int  # all so far, of all n, whatever the output kind
    num_preemptions: int
    times: RequestTimes
    warnings: list[str] = field(default_factory=list)
    error: str | None = None  # why the engine gave up on this request, with `FinishReason.ERROR`
    error_param: str | None = None  # the field of the request that is to blame; without it, the engine is
    prompt_logprobs: list[TokenAlternatives | None] | None = None  # None first; with `OutputKind.DELTA` told once
    pooled: bytes | None = None  # f32 in the machine's byte order, of a request for a vector or score

    def failure(self, subject: str = "") -> EngineError:
        """The error that `error` stands for, for whoever raises it."""
        text = f"{subject}{self.error}"
        return RequestFailed(text) if self.error_param is None else InvalidRequest(text, param=self.error_param)


class RequestOutputCollector:
    """One slot between the engine's output and one consumer; a slow consumer finds several outputs merged into one."""

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._output: RequestOutput | None = None
        self._error: EngineError | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._output is not None and self._kind is OutputKind.DELTA:
            output = merge_deltas(self._output, output)
        self._output = output
        self._ready.set()

    def fail(self, error: EngineError) -> None:
        """What was put before is still delivered; then `get` raises."""
        self._error = self._error or error
        self._ready.set()

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._ready.clear()
        return output


def merge_deltas(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    merged = {output.index: output for output in older.outputs}
    for new in newer.outputs:
        old = merged.get(new.index)
        merged[new.index] = new if old is None else _join(old, new)
    return replace(
        newer, outputs=by_index(merged.values()), prompt_logprobs=newer.prompt_logprobs or older.prompt_logprobs
    )


def by_index(outputs: Iterable[CompletionOutput]) -> list[CompletionOutput]:
    return sorted(outputs, key=lambda output: output.index)


def _join(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = None if new.logprobs is None else (old.logprobs or []) + new.logprobs
    return replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs)
