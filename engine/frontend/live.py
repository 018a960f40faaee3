"""Requests that are still being answered: what has come of each, and when there is something to tell."""

from __future__ import annotations

import time
from dataclasses import replace

from inferd.engine.frontend.detokenize import IncrementalDetokenizer
from inferd.engine.frontend.inputs import PreparedRequest
from inferd.engine.frontend.logprobs import LogprobReader, TokenAlternatives, TokenBytes
from inferd.engine.frontend.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestOutputCollector,
    RequestTimes,
    by_index,
)
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.messages import AddRequest, EngineOutput, FinishReason
from inferd.engine.params import OutputKind


class LiveChoice:
    """One of the n answers to a request: a request of its own in the engine."""

    def __init__(
        self,
        index: int,
        add: AddRequest,
        request: LiveRequest,
        tokenizer: Tokenizer | None,
        token_bytes: TokenBytes | None,
    ) -> None:
        self.index = index
        self.add = add
        self.request = request
        self.num_output_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._delta = add.params.output_kind is OutputKind.DELTA
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, add.params)
        self._reader = LogprobReader(token_bytes)
        self._texts: list[str] = []  # this and the next two: to be reported, all, or with DELTA what is new
        self._token_ids: list[int] = []
        self._logprobs: list[TokenAlternatives] | None = None if add.params.logprobs is None else []

    def take(self, output: EngineOutput) -> tuple[FinishReason | None, int | str | None]:
        """Why it has ended, if so. A stop string may end it before the engine knows."""
        stop = self._append(output)
        if stop is not None:
            return FinishReason.STOP, stop
        if output.finish_reason is not None:
            self.flush()
        return output.finish_reason, output.stop_reason

    def flush(self) -> None:
        """Lets go of what the detokenizer still holds."""
        if self._detokenizer is not None:
            self._texts.append(self._detokenizer.finish())

    def report(self, reason: FinishReason | None, stop_reason: int | str | None) -> CompletionOutput | None:
        """None when there is nothing new to a reader of deltas."""
        if reason is None and self._delta and not self._token_ids:
            return None
        text = "".join(self._texts)
        token_ids, logprobs = self._token_ids, self._logprobs
        if self._delta:
            self._texts, self._token_ids, self._logprobs = [], [], None if logprobs is None else []
        else:
            self._texts, token_ids = [text], list(token_ids)
            logprobs = None if logprobs is None else list(logprobs)
        return CompletionOutput(self.index, text, token_ids, reason, stop_reason, logprobs)

    def _append(self, output: EngineOutput) -> str | None:
        """Appends tokens and text; the stop string that they completed."""
        num_tokens, stop = len(output.new_token_ids), None
        if self._detokenizer is not None:
            ends_in_stop_token = output.finish_reason is FinishReason.STOP
            new = self._detokenizer.update(output.new_token_ids, ends_in_stop_token=ends_in_stop_token)
            num_tokens, stop = new.num_tokens, new.stop
            self._texts.append(new.text)
        self._token_ids += output.new_token_ids[:num_tokens]
        self.num_output_tokens += num_tokens
        if self._logprobs is not None and output.logprobs is not None:
            self._logprobs += self._reader.read(output.logprobs.cut(0, num_tokens))
        return stop


class LiveRequest:
    """A caller's request. `collector` is None for the synchronous engine, which reads returned outputs."""

    def __init__(
        self,
        request: PreparedRequest,
        tokenizer: Tokenizer | None,
        token_bytes: TokenBytes | None = None,
        collector: RequestOutputCollector | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.internal_id = request.add.request_id
        self.collector = collector
        self._request = request
        self._kind = request.add.params.output_kind
        self._token_bytes = token_bytes
        self.choices = [
            LiveChoice(index, add, self, tokenizer, token_bytes) for index, add in enumerate(request.split_choices())
        ]
        self._unfinished = {choice.index for choice in self.choices}
        self._reports: dict[int, CompletionOutput] = {}  # the newest of each; not with DELTA
        self._prompt_logprobs: list[TokenAlternatives | None] | None = None
        self._num_cached_tokens = 0
        self._num_preemptions = [0] * len(self.choices)
        self._times = RequestTimes(request.add.arrival_time_s, time.monotonic())

    @property
    def arrival_s(self) -> float:
        """Monotonic."""
        return self._times.arrival_s

    @property
    def unfinished(self) -> list[LiveChoice]:
        return [self.choices[index] for index in sorted(self._unfinished)]

    def update(self, choice: LiveChoice, output: EngineOutput, now_s: float) -> RequestOutput | None:
        """What to report now, if anything."""
        if choice.index == 0:  # the others find in the cache what it has just computed
            self._num_cached_tokens = output.num_cached_tokens
        self._num_preemptions[choice.index] = output.num_preemptions
        if output.new_token_ids and self._times.first_token_s is None:
            self._times.first_token_s = now_s
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *LogprobReader(self._token_bytes).read(output.prompt_logprobs)]
        reason, stop_reason = choice.take(output)
        report = self._report(choice, reason, stop_reason, now_s)
        if report is not None:
            report.error, report.error_param = output.error, output.error_param
            report.pooled = output.pooled
        return report

    def abort(self, choice: LiveChoice, now_s: float) -> RequestOutput | None:
        """Ends one choice with what its detokenizer still held."""
        choice.flush()
        return self._report(choice, FinishReason.ABORT, None, now_s)

    def fail(self, choice: LiveChoice, error: str, now_s: float) -> RequestOutput:
        """Ends the request with what there is."""
        self._unfinished = {choice.index}
        report = self._report(choice, FinishReason.ERROR, None, now_s)
        assert report is not None
        report.error = error
        return report

    def _report(
        self, choice: LiveChoice, reason: FinishReason | None, stop_reason: int | str | None, now_s: float
    ) -> RequestOutput | None:
        if reason is not None:
            choice.finish_reason = reason
            self._unfinished.discard(choice.index)
            if reason is FinishReason.ERROR:
                self._unfinished.clear()  # the others are of no use to a caller who gets an error
            if not self._unfinished:
                self._times.finished_s = now_s
        if reason is None and self._kind is OutputKind.FINAL_ONLY:
            return None
        new = choice.report(reason, stop_reason)
        if new is None:
            return None
        outputs = [new]
        if self._kind is not OutputKind.DELTA:
            self._reports[choice.index] = new
            outputs = by_index(self._reports.values())
        if self._kind is OutputKind.FINAL_ONLY and self._unfinished:
            return None
        return self._assemble(outputs)

    def _assemble(self, outputs: list[CompletionOutput]) -> RequestOutput:
        prompt_logprobs = self._prompt_logprobs
        if self._kind is OutputKind.DELTA:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._request.add.prompt_token_ids,
            outputs=outputs,
            finished=not self._unfinished,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=sum(choice.num_output_tokens for choice in self.choices),
            num_preemptions=sum(self._num_preemptions),
            times=replace(self._times),
            warnings=self._request.warnings,
            prompt_logprobs=prompt_logprobs,
        )
