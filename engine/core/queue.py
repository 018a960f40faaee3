"""Requests that wait for admission, in the order in which they will get it."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from inferd.engine.request import Request

Standing = tuple[int, int]
"""A request's place among others: its class, then the order inside that. Smaller is better; ties go by admission."""


class RequestQueue(Protocol):
    """The order is the policy. Removal by id is cheap, because thousands may wait and clients leave at any time."""

    def add(self, request: Request) -> None:
        """A new request."""
        ...

    def prepend(self, request: Request) -> None:
        """A request that was set aside, or preempted: it is next, or as near to it as the order allows."""
        ...

    def peek(self) -> Request:
        """The next one; raises `IndexError` when nobody waits."""
        ...

    def take(self, request: Request) -> None:
        """It runs from now on, until `prepend` or `release`. Raises `KeyError` for one that does not wait."""
        ...

    def remove(self, request_id: str) -> None:
        """Raises `KeyError` for an id that does not wait."""
        ...

    def release(self, request: Request) -> None:
        """A request that ran has ended."""
        ...

    def set_aside(self, request: Request) -> None:
        """It leaves the queue, and what is counted of it stays, until `add_back`."""
        ...

    def add_back(self, request: Request) -> None:
        """One that was set aside is in its place again, as its priority and its arrival have it."""
        ...

    def standing(self, request: Request) -> Standing:
        """Where it stands among the running ones, which get their tokens in this order; the last is preempted first.

        A waiting request of a better class than a running one may take its place.
        """
        ...

    def outranks(self, running: Request) -> bool:
        """Whether any waiting request is of a better class than this running one. Called every step: cheap."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be admitted, if nobody else came."""
        ...


class FCFSRequestQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def prepend(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        for request in self._requests.values():
            return request
        raise IndexError("no request is waiting")

    def take(self, request: Request) -> None:
        del self._requests[request.request_id]

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]

    def release(self, request: Request) -> None:
        """Nothing is kept of those that run."""

    def set_aside(self, request: Request) -> None:
        self.remove(request.request_id)

    def add_back(self, request: Request) -> None:
        later = [other for other in self._requests.values() if other.number > request.number]
        self.add(request)
        for other in later:
            self._requests.move_to_end(other.request_id)

    def standing(self, request: Request) -> Standing:
        return 0, 0

    def outranks(self, running: Request) -> bool:
        return False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityRequestQueue:
    """By priority, the smaller sooner, then by arrival; a preempted request is in its old place again."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._heap: list[tuple[int, int, str]] = []  # with those that left; they are passed over

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, _place(request))

    def prepend(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        while self._heap:
            request = self._requests.get(self._heap[0][2])
            if request is not None and _place(request) == self._heap[0]:
                return request
            heapq.heappop(self._heap)
        raise IndexError("no request is waiting")

    def take(self, request: Request) -> None:
        self.remove(request.request_id)

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]
        if len(self._heap) > 2 * len(self._requests) + 64:  # or those that left would pile up behind the first
            self._heap = [_place(request) for request in self._requests.values()]
            heapq.heapify(self._heap)

    def release(self, request: Request) -> None:
        """Nothing is kept of those that run."""

    def set_aside(self, request: Request) -> None:
        self.remove(request.request_id)

    def add_back(self, request: Request) -> None:
        self.add(request)

    def standing(self, request: Request) -> Standing:
        return request.priority, request.number

    def outranks(self, running: Request) -> bool:
        return bool(self._requests) and self.peek().priority < running.priority

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=_place))


def _place(request: Request) -> tuple[int, int, str]:
    return request.priority, request.number, request.request_id
