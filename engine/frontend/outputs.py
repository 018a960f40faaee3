"""From the engine's token ids to what a caller reads: text, finish reasons, times."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from inferd.engine.errors import EngineDeadError, EngineError, RequestFailed
from inferd.engine.frontend.detokenize import IncrementalDetokenizer
from inferd.engine.frontend.inputs import PreparedRequest
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.messages import EngineOutput, FinishReason
from inferd.engine.params import OutputKind

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestTimes:
    """Monotonic clock of this process, except `arrival_wall_s`."""

    arrival_wall_s: float
    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """`text` and `token_ids` are all so far, or what is new with `OutputKind.DELTA`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string, unless it was the model's end of sequence


@dataclass(slots=True)
class RequestOutput:
    request_id: str  # as the caller named it
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    num_output_tokens: int  # all so far, whatever the output kind
    num_preemptions: int
    times: RequestTimes
    warnings: list[str] = field(default_factory=list)
    error: str | None = None  # why the engine gave up on this request, with `FinishReason.ERROR`


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
    merged = [
        replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids)
        for old, new in zip(older.outputs, newer.outputs, strict=True)
    ]
    return replace(newer, outputs=merged)


class RequestState:
    """One live request in the front. `collector` is None for the synchronous engine, which reads returned outputs."""

    def __init__(
        self, request: PreparedRequest, tokenizer: Tokenizer | None, collector: RequestOutputCollector | None = None
    ) -> None:
        self.request_id = request.request_id
        self.internal_id = request.add.request_id
        self.collector = collector
        self._request = request
        self._kind = request.add.params.output_kind
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, request.add.params)
        self._texts: list[str] = []  # to be reported: all, or with DELTA what is new
        self._token_ids: list[int] = []
        self._num_reported_tokens = 0
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._times = RequestTimes(request.add.arrival_time_s, time.monotonic())

    def update(self, output: EngineOutput, now_s: float) -> tuple[RequestOutput | None, bool]:
        """What to report, and whether a stop string ended the request before the engine knew."""
        self._num_cached_tokens = output.num_cached_tokens
        self._num_preemptions = output.num_preemptions
        if output.new_token_ids and self._times.first_token_s is None:
            self._times.first_token_s = now_s
        stop = self._take(output)
        if stop is not None:
            return self._finish(FinishReason.STOP, stop, now_s), output.finish_reason is None
        if output.finish_reason is not None:
            report = self.finish(output.finish_reason, output.stop_reason, now_s)
            report.error = output.error
            return report, False
        return self._report(None, None), False

    def finish(self, reason: FinishReason, stop_reason: int | str | None, now_s: float) -> RequestOutput:
        """Ends the request with what its detokenizer still held."""
        if self._detokenizer is not None:
            self._texts.append(self._detokenizer.finish())
        return self._finish(reason, stop_reason, now_s)

    def fail(self, error: str, now_s: float) -> RequestOutput:
        """Ends the request with what there is."""
        report = self._finish(FinishReason.ERROR, None, now_s)
        report.error = error
        return report

    def _take(self, output: EngineOutput) -> str | None:
        """Appends tokens and text; the stop string that they completed."""
        if self._detokenizer is None:
            self._token_ids += output.new_token_ids
            return None
        ends_in_stop_token = output.finish_reason is FinishReason.STOP
        new = self._detokenizer.update(output.new_token_ids, ends_in_stop_token=ends_in_stop_token)
        self._token_ids += output.new_token_ids[: new.num_tokens]
        self._texts.append(new.text)
        return new.stop

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, now_s: float) -> RequestOutput:
        self._times.finished_s = now_s
        report = self._report(reason, stop_reason)
        assert report is not None
        return report

    def _report(self, reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput | None:
        if reason is None and self._kind is OutputKind.FINAL_ONLY:
            return None
        delta = self._kind is OutputKind.DELTA
        text = "".join(self._texts)
        token_ids = self._token_ids[self._num_reported_tokens :] if delta else list(self._token_ids)
        if reason is None and delta and not token_ids:
            return None
        self._texts = [] if delta else [text]
        self._num_reported_tokens = len(self._token_ids)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._request.add.prompt_token_ids,
            outputs=[CompletionOutput(0, text, token_ids, reason, stop_reason)],
            finished=reason is not None,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=len(self._token_ids),
            num_preemptions=self._num_preemptions,
            times=replace(self._times),
            warnings=self._request.warnings,
        )


@dataclass(slots=True)
class ProcessedOutputs:
    reports: list[RequestOutput] = field(default_factory=list)  # of requests without a collector
    ids_to_abort: list[str] = field(default_factory=list)  # internal: ended here, still running in the engine


class OutputProcessor:
    """All live requests of one front, by internal id. Used by one thread."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._states)

    def add(self, request: PreparedRequest, collector: RequestOutputCollector | None = None) -> None:
        self._states[request.add.request_id] = RequestState(request, self._tokenizer, collector)

    def process(self, outputs: Iterable[EngineOutput]) -> ProcessedOutputs:
        """Ids that are not (or no longer) live are passed over: the engine may not know yet that they ended.

        A request whose text cannot be made fails, and the others do not notice.
        """
        processed = ProcessedOutputs()
        now_s = time.monotonic()
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            try:
                report, stopped_here = state.update(output, now_s)
            except Exception as error:
                logger.exception("the output of request %s cannot be turned into text", state.internal_id)
                report = state.fail(f"its output cannot be turned into text: {type(error).__name__}: {error}", now_s)
                stopped_here = output.finish_reason is None
            if stopped_here:
                processed.ids_to_abort.append(state.internal_id)
            if report is not None:
                self._deliver(state, report, processed)
        return processed

    def abort(self, internal_ids: Iterable[str]) -> ProcessedOutputs:
        """Ends requests here; a waiting collector gets its last output too. Unknown ids are passed over."""
        processed = ProcessedOutputs()
        now_s = time.monotonic()
        for internal_id in internal_ids:
            state = self._states.get(internal_id)
            if state is not None:
                processed.ids_to_abort.append(internal_id)
                self._deliver(state, state.finish(FinishReason.ABORT, None, now_s), processed)
        return processed

    def internal_ids(self, request_id: str | None = None) -> list[str]:
        """Of every live request, or of those that the caller named so."""
        return [own for own, state in self._states.items() if request_id in (None, state.request_id)]

    def fail_all(self, error: EngineDeadError) -> None:
        """Every live request ends with this error at its collector."""
        states, self._states = self._states, {}
        for state in states.values():
            if state.collector is not None:
                state.collector.fail(EngineDeadError(str(error)))

    def _deliver(self, state: RequestState, report: RequestOutput, processed: ProcessedOutputs) -> None:
        if report.finished:
            del self._states[state.internal_id]
        if state.collector is None:
            processed.reports.append(report)
        elif report.error is None:
            state.collector.put(report)
        else:
            state.collector.fail(RequestFailed(report.error))
