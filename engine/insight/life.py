"""When what happened to one request, and what only the moment it happened could tell."""

from __future__ import annotations

from dataclasses import dataclass

RATE_WINDOW_S = 1.0  # a rate covers between one and two of these
Mark = tuple[float, int]  # a time, and how many output tokens there were


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left what was cached."""

    at: int  # index of the first token that differs from all that stood there, or goes beyond it
    request_id: str | None  # who computed what stood there


@dataclass(slots=True)
class Life:
    """Times of the engine's clock. The scheduler writes it as things happen, everybody else reads."""

    queued_at: float = 0.0
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    preempted_at: float = 0.0  # the last time
    finished_at: float | None = None
    num_blocks_peak: int = 0
    divergence: Divergence | None = None
    num_drafted: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # of them
    _first: Mark | None = None
    _older: Mark | None = None  # where the window of the rate begins
    _newer: Mark | None = None

    def gain(self, now: float, num_output_tokens: int) -> None:
        """Output tokens came; that many it has now."""
        self.last_token_at = now
        newer = self._newer
        if newer is not None and now - newer[0] < RATE_WINDOW_S:
            return
        self._older, self._newer = newer, (now, num_output_tokens)
        if self._first is None:
            self.first_token_at, self._first = now, self._newer

    def interrupt(self, now: float) -> None:
        """It gave up its blocks: the time until its next token says nothing about its speed."""
        self.preempted_at = now
        self._older = self._newer = None

    def tokens_per_s(self, num_output_tokens: int) -> float:
        """Of late, while it runs; of all of its output once it has ended. 0.0 when it cannot be known."""
        since = (self._older or self._newer) if self.finished_at is None else self._first
        if since is None or self.last_token_at is None or self.last_token_at <= since[0]:
            return 0.0
        return (num_output_tokens - since[1]) / (self.last_token_at - since[0])
