"""When running requests end, and whose end lets another one start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inferd.engine.request import Request


@dataclass(frozen=True, slots=True)
class Relief:
    """Enough becomes free once these have ended."""

    request: Request  # the last of them to end
    num_others: int
    amount: int  # what all of them give back
    in_s: float
    is_certain: bool  # they end then; else at the latest


def time_to_end_s(request: Request) -> float | None:
    """At its present speed, if it goes on for as long as it may. None when its speed is not known."""
    speed = request.life.tokens_per_s(request.num_output_tokens)
    return (request.max_tokens - request.num_output_tokens) / speed if speed > 0 else None


def runs_to_its_limit(request: Request) -> bool:
    """Whether nothing that it generates can end it before `max_tokens`."""
    params = request.params
    if params.min_tokens >= request.max_tokens:
        return True
    stops = params.stop or params.stop_token_ids or params.repetition_detection or request.structured_output
    return params.ignore_eos and not stops


def find_relief(running: Iterable[Request], missing: int, given_back: Callable[[Request], int]) -> Relief | None:
    """The first of the running requests to end that together give back `missing`. None when that cannot be said."""
    ends = [(in_s, request) for request in running if (in_s := time_to_end_s(request)) is not None]
    ends.sort(key=lambda end: end[0])
    amount, is_certain = 0, True
    for num_others, (in_s, request) in enumerate(ends):
        amount += given_back(request)
        is_certain = is_certain and runs_to_its_limit(request)
        if amount >= missing:
            return Relief(request, num_others, amount, in_s, is_certain)
    return None
