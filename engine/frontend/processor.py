"""From the engine's outputs to those of its callers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from inferd.engine.errors import EngineDeadError
from inferd.engine.frontend.inputs import PreparedRequest
from inferd.engine.frontend.live import LiveChoice, LiveRequest
from inferd.engine.frontend.logprobs import TokenBytes
from inferd.engine.frontend.outputs import RequestOutput, RequestOutputCollector
from inferd.engine.frontend.stats import LatencyMeter
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.messages import AddRequest, EngineOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ProcessedOutputs:
    reports: list[RequestOutput] = field(default_factory=list)  # of requests without a collector
    ids_to_abort: list[str] = field(default_factory=list)  # the engine's: ended here, still running there


class OutputProcessor:
    """All live requests of one front. Used by one thread.

    A request's internal id is that of its `PreparedRequest.add`; in the engine each of its n choices has its own.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = None if tokenizer is None else TokenBytes(tokenizer)
        self._requests: dict[str, LiveRequest] = {}  # by internal id
        self._choices: dict[str, LiveChoice] = {}  # by the engine's id
        self.meter: LatencyMeter | None = None

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def add(self, request: PreparedRequest, collector: RequestOutputCollector | None = None) -> list[AddRequest]:
        """What to send to the engine."""
        tokenizer = self._tokenizer if request.add.pooling is None else None  # a vector is no text
        live = LiveRequest(request, tokenizer, self._token_bytes, collector)
        self._requests[live.internal_id] = live
        self._choices.update({choice.add.request_id: choice for choice in live.choices})
        return [choice.add for choice in live.choices]

    def process(self, outputs: Iterable[EngineOutput], at: float = 0.0) -> ProcessedOutputs:
        """Ids that are not (or no longer) live are passed over: the engine may not know yet that they ended. `at`: when
        the engine had them, by its clock.

        A request whose text cannot be made fails, and the others do not notice.
        """
        processed = ProcessedOutputs()
        now_s = time.monotonic()
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is not None:
                if self.meter is not None:
                    self.meter.take(choice, output, at, now_s)
                self._process_one(choice, output, now_s, processed)
        return processed

    def abort(self, internal_ids: Iterable[str]) -> ProcessedOutputs:
        """Ends requests here; a waiting collector gets its last output too. Unknown ids are passed over."""
        processed = ProcessedOutputs()
        now_s = time.monotonic()
        for internal_id in internal_ids:
            live = self._requests.get(internal_id)
            for choice in live.unfinished if live is not None else ():
                processed.ids_to_abort.append(choice.add.request_id)
                report = choice.request.abort(choice, now_s)
                self._measure_end(choice, now_s)
                self._deliver(choice.request, report, processed)
        return processed

    def internal_ids(self, request_id: str | None = None) -> list[str]:
        """Of every live request, or of those that the caller named so."""
        return [own for own, live in self._requests.items() if request_id in (None, live.request_id)]

    def fail_all(self, error: EngineDeadError) -> None:
        """Every live request ends with this error at its collector."""
        requests, self._requests = self._requests, {}
        self._choices.clear()
        for live in requests.values():
            if live.collector is not None:
                live.collector.fail(EngineDeadError(str(error)))

    def _process_one(self, choice: LiveChoice, output: EngineOutput, now_s: float, processed: ProcessedOutputs) -> None:
        live = choice.request
        before = live.unfinished
        try:
            report = live.update(choice, output, now_s)
        except Exception as error:
            logger.exception("the output of request %s cannot be turned into text", output.request_id)
            report = live.fail(choice, f"its output cannot be turned into text: {type(error).__name__}: {error}", now_s)
        still = live.unfinished
        for ended in before:
            if ended not in still:
                del self._choices[ended.add.request_id]
                self._measure_end(ended, now_s)
                if ended is not choice or output.finish_reason is None:
                    processed.ids_to_abort.append(ended.add.request_id)
        self._deliver(live, report, processed)

    def _measure_end(self, choice: LiveChoice, now_s: float) -> None:
        if self.meter is not None:
            self.meter.end(choice, now_s)

    def _deliver(self, live: LiveRequest, report: RequestOutput | None, processed: ProcessedOutputs) -> None:
        if report is None:
            return
        if report.finished:
            self._forget(live)
        if live.collector is None:
            processed.reports.append(report)
        elif report.error is None:
            live.collector.put(report)
        else:
            live.collector.fail(report.failure())

    def _forget(self, live: LiveRequest) -> None:
        self._requests.pop(live.internal_id, None)
        for choice in live.choices:
            self._choices.pop(choice.add.request_id, None)
