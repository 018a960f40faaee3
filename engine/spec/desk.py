"""Drafts on the scheduler's side: how many each request is to get, and those that wait to be checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inferd.engine.config import EngineConfig, SpeculativeConfig
from inferd.engine.core.batch import longest_length
from inferd.engine.core.speculation import NoSpeculation, Speculation
from inferd.engine.request import Request, RequestStatus
from inferd.engine.spec.length import Confidence, after_check, break_even_share, draft_length


@dataclass(slots=True)
class _Tracked:
    confidence: Confidence = field(default_factory=Confidence)
    drafts: list[int] = field(default_factory=list)
    num_tokens: int = 0  # of the request: what the drafts follow on


def make_speculation(config: EngineConfig) -> Speculation:
    """Of an engine whose longest context is settled."""
    if config.speculative is None:
        return NoSpeculation()
    return DraftDesk(config.speculative, config.scheduler.max_model_len)


class DraftDesk:
    """Implements `core.speculation.Speculation`."""

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self._longest = config.num_tokens
        self._num_fixed_rows = config.num_fixed_rows
        self._needs_slots = config.num_lookahead_tokens > 0
        self._max_model_len = max_model_len
        self._tracked: dict[str, _Tracked] = {}

    def holds_back(self, request: Request) -> bool:
        return request.num_output_placeholders > 0 and self._length(request) > 0

    def take(self, request: Request, most: int) -> list[int]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.num_tokens != request.num_tokens:
            return []
        drafts, tracked.drafts = tracked.drafts, []
        left = longest_length(request, self._max_model_len) - request.num_tokens - 1
        return drafts[: max(min(most, left, self._length(request)), 0)]

    def num_lookahead_tokens(self, request: Request) -> int:
        return self._num_wanted(request) if self._needs_slots else 0

    def wanted(self, requests: Iterable[Request]) -> dict[str, int]:
        numbers = ((request.request_id, self._num_wanted(request)) for request in requests)
        return {request_id: number for request_id, number in numbers if number}

    def put(self, request: Request, drafts: list[int]) -> None:
        if request.status is RequestStatus.RUNNING:
            tracked = self._of(request)
            tracked.drafts, tracked.num_tokens = drafts, request.num_tokens

    def checked(self, request: Request, num_drafts: int, num_accepted: int, num_running: int) -> None:
        tracked = self._of(request)
        break_even = break_even_share(num_running, self._num_fixed_rows)
        tracked.confidence = after_check(
            tracked.confidence, num_drafts, num_accepted, request.num_output_tokens, break_even
        )

    def drop(self, request_id: str) -> None:
        if request_id in self._tracked:
            self._tracked[request_id].drafts = []

    def forget(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)

    def _num_wanted(self, request: Request) -> int:
        """After a step that gives it one token at least, and no more than the request still has use for."""
        left = longest_length(request, self._max_model_len) - request.num_tokens - 2
        return max(min(self._length(request), left), 0)

    def _length(self, request: Request) -> int:
        tracked = self._tracked.get(request.request_id)
        confidence = tracked.confidence if tracked is not None else Confidence()
        return draft_length(confidence, self._longest, request.num_output_tokens)

    def _of(self, request: Request) -> _Tracked:
        return self._tracked.setdefault(request.request_id, _Tracked())
