"""What latency histograms are made of, told as it happens; nothing is kept once it was told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from inferd.engine.frontend.live import LiveChoice
from inferd.engine.messages import EngineOutput, FinishReason, RequestStart


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One answer to a request, at its end. Durations are None where it did not come that far."""

    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int  # of the prompt
    output_tokens: int
    max_tokens: int | None
    e2e_s: float  # since the request came to the front
    queue_s: float | None  # in the engine's queue, the first time
    prefill_s: float | None  # from there to the first token
    decode_s: float | None  # from the first token to the last one
    num_choices: int | None  # of the request, whose last answer this is; else None
    longest_output_tokens: int | None  # of all its answers, likewise

    @property
    def computed_prompt_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def inference_s(self) -> float | None:
        return None if self.prefill_s is None or self.decode_s is None else self.prefill_s + self.decode_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Without the first token."""
        return None if self.decode_s is None or self.output_tokens < 2 else self.decode_s / (self.output_tokens - 1)


class LatencyObserver(Protocol):
    """Called for every answer, from the thread that reads the engine's outputs; quick, and without an exception."""

    def first_token(self, seconds: float) -> None:
        """Since the request came to the front."""
        ...

    def next_tokens(self, seconds: float, count: int) -> None:
        """So long after those before them, by the engine's clock, came the tokens of a step: one, or with speculation
        several."""
        ...

    def finished(self, choice: FinishedChoice) -> None: ...


@dataclass(slots=True)
class _Followed:
    start: RequestStart | None = None
    last_token_at: float | None = None
    cached_tokens: int = 0


class LatencyMeter:
    """Follows the live answers for an observer; those that had begun before it came are told of at their end alone."""

    def __init__(self, observer: LatencyObserver) -> None:
        self._observer = observer
        self._followed: dict[str, _Followed] = {}  # by the engine's id

    def take(self, choice: LiveChoice, output: EngineOutput, at: float, now_s: float) -> None:
        """`at`: when the engine sent it, by its own clock; `now_s`: monotonic."""
        followed = self._followed.setdefault(output.request_id, _Followed())
        followed.cached_tokens = output.num_cached_tokens
        if not output.new_token_ids:
            return
        if output.start is not None:
            followed.start = output.start
            self._observer.first_token(now_s - choice.request.arrival_s)
        elif followed.last_token_at is not None:
            self._observer.next_tokens(at - followed.last_token_at, len(output.new_token_ids))
        followed.last_token_at = at

    def end(self, choice: LiveChoice, now_s: float) -> None:
        followed = self._followed.pop(choice.add.request_id, None) or _Followed()
        start, last, request = followed.start, followed.last_token_at, choice.request
        is_last = not request.unfinished
        finished = FinishedChoice(
            finish_reason=choice.finish_reason or FinishReason.ERROR,
            prompt_tokens=len(choice.add.prompt_token_ids),
            cached_tokens=followed.cached_tokens,
            output_tokens=choice.num_output_tokens,
            max_tokens=choice.add.params.max_tokens,
            e2e_s=now_s - request.arrival_s,
            queue_s=None if start is None else start.first_scheduled_at - start.queued_at,
            prefill_s=None if start is None else start.first_token_at - start.first_scheduled_at,
            decode_s=None if start is None or last is None else last - start.first_token_at,
            num_choices=len(request.choices) if is_last else None,
            longest_output_tokens=max(c.num_output_tokens for c in request.choices) if is_last else None,
        )
        self._observer.finished(finished)
