"""Whether a request may come in now: its key's limits, and the length of its model's queue.

Refusals are quick, before anything of a prompt is looked at, and say when to come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from inferd.appliance.auth.limiter import Limiter, LimitReached
from inferd.appliance.auth.principal import Principal
from inferd.appliance.auth.usage import DAY_S, UsageStore
from inferd.appliance.requests.live import LiveRequest


class TooMany(Exception):
    """Come back after `retry_after_s`."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass
class Spent:
    """What a request has used, known at its end."""

    live: LiveRequest | None = None


class Admission:
    """`num_open`: requests that a model has, waiting ones among them; `max_open`: how many it may have."""

    def __init__(self, usage: UsageStore, num_open: Callable[[str], int], max_open: Callable[[], int]) -> None:
        self._usage = usage
        self._num_open = num_open
        self._max_open = max_open
        self._limiter = Limiter()
        self._pace = Pace()

    @contextmanager
    def admitted(self, who: Principal, model: str) -> Iterator[Spent]:
        """Raises `TooMany`."""
        if (num_open := self._num_open(model)) >= (max_open := self._max_open()):
            text = f"{model} has {num_open} requests already, and no more than {max_open} may wait"
            raise TooMany(text, self._pace.expected_wait_s(model, num_open))
        try:
            self._limiter.begin(
                who,
                time.monotonic(),
                tokens_today=0 if who.key_id is None else self._usage.tokens_today(who.name),
                seconds_of_day_left=DAY_S - time.time() % DAY_S,
            )
        except LimitReached as error:
            raise TooMany(str(error), error.retry_after_s) from None
        spent, began = Spent(), time.monotonic()
        try:
            yield spent
        finally:
            self._limiter.end(who, self._count(who, model, spent.live), time.monotonic())
            self._pace.took(model, time.monotonic() - began, num_open + 1)

    def _count(self, who: Principal, model: str, live: LiveRequest | None) -> int:
        if live is None:
            return 0
        record = live.record()
        self._usage.add(
            who.name,
            model,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
        )
        return record.prompt_tokens + record.output_tokens


class Pace:
    """How quickly a model gets through its requests, learnt from those that are through."""

    WEIGHT = 0.2  # of the newest
    LONGEST_S = 60.0

    def __init__(self) -> None:
        self._gap_s: dict[str, float] = {}

    def took(self, model: str, seconds: float, num_together: int) -> None:
        gap_s = seconds / max(num_together, 1)
        before = self._gap_s.get(model, gap_s)
        self._gap_s[model] = before + self.WEIGHT * (gap_s - before)

    def expected_wait_s(self, model: str, num_open: int) -> float:
        """Until about a tenth of those that are there are through."""
        return min(max(self._gap_s.get(model, 1.0) * max(num_open / 10, 1.0), 1.0), self.LONGEST_S)
