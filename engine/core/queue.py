"""Requests that wait for admission, in the order in which they will get it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from inferd.engine.request import Request


class RequestQueue(Protocol):
    """The order is the policy. Removal by id is cheap, because thousands may wait and clients leave at any time."""

    def add(self, request: Request) -> None:
        """A new request."""
        ...

    def prepend(self, request: Request) -> None:
        """A request that was taken out, or preempted: it is next, or as near to it as the order allows."""
        ...

    def peek(self) -> Request:
        """The next one; raises `IndexError` when nobody waits."""
        ...

    def pop(self) -> Request:
        """Take the next one out; raises `IndexError` when nobody waits."""
        ...

    def remove(self, request_id: str) -> None:
        """Raises `KeyError` for an id that does not wait."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


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

    def pop(self) -> Request:
        request = self.peek()
        del self._requests[request.request_id]
        return request

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())
