"""What scheduling asks of whoever keeps the drafts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from inferd.engine.request import Request


class Speculation(Protocol):
    """A draft is a guess of the next tokens of a running request, made by the workers after one step and checked by
    the next. Requests are known here from their first draft on until `forget`."""

    def holds_back(self, request: Request) -> bool:
        """Whether it has to wait for the results that are on their way, because its drafts follow on them."""
        ...

    def take(self, request: Request, most: int) -> list[int]:
        """Its drafts, to be checked in the step that is being put together; at most so many. The others are gone."""
        ...

    def num_lookahead_tokens(self, request: Request) -> int:
        """Slots behind the step's tokens that making the next draft needs."""
        ...

    def wanted(self, requests: Iterable[Request]) -> dict[str, int]:
        """Of a step's requests: which are to get drafts after it, and how long they may be. One whose prompt is not
        all computed then gets none, but whoever drafts should go along."""
        ...

    def put(self, request: Request, drafts: list[int]) -> None:
        """What the workers made up; of no use to a request that has been preempted meanwhile."""
        ...

    def checked(self, request: Request, num_drafts: int, num_accepted: int, num_running: int) -> None:
        """So many of its drafts stood, while so many requests ran. The tokens are not appended yet."""
        ...

    def drop(self, request_id: str) -> None:
        """It was preempted: nothing of it waits to be checked. Unknown ids are ignored."""
        ...

    def forget(self, request_id: str) -> None:
        """It has ended. Unknown ids are ignored."""
        ...


class NoSpeculation:
    """Implements `Speculation` where nothing is drafted."""

    def holds_back(self, request: Request) -> bool:
        return False

    def take(self, request: Request, most: int) -> list[int]:
        return []

    def num_lookahead_tokens(self, request: Request) -> int:
        return 0

    def wanted(self, requests: Iterable[Request]) -> dict[str, int]:
        return {}

    def put(self, request: Request, drafts: list[int]) -> None:
        raise ValueError(f"drafts came for request {request.request_id!r}, for which nobody asked")

    def checked(self, request: Request, num_drafts: int, num_accepted: int, num_running: int) -> None:
        raise ValueError(f"drafts of request {request.request_id!r} were checked, which has none")

    def drop(self, request_id: str) -> None:
        """There is nothing."""

    def forget(self, request_id: str) -> None:
        """There is nothing."""
