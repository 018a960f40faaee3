"""The weighted-fair queue: lanes share the engine by weight, and inside a lane every client gets the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from inferd.engine.core.queue import PriorityRequestQueue, Standing
from inferd.engine.messages import LANES
from inferd.engine.request import Request

LANE_WEIGHTS = {"interactive": 8.0, "batch": 1.0}
MAX_REMEMBERED = 1000  # clients of a lane


@dataclass(slots=True)
class _Client:
    """The requests of one client in one lane."""

    queue: PriorityRequestQueue = field(default_factory=PriorityRequestQueue)
    num_running: int = 0
    served: float = 0.0  # tokens

    @property
    def is_idle(self) -> bool:
        return not (self.queue or self.num_running)


@dataclass(slots=True)
class _Lane:
    weight: float
    clients: dict[str, _Client] = field(default_factory=dict)
    num_waiting: int = 0
    served: float = 0.0  # tokens by weight
    floor: float = 0.0  # what the client had been served whose request was taken last: the least of those that waited

    def next_client(self) -> _Client:
        waiting = [client for client in self.clients.values() if client.queue]
        return min(waiting, key=lambda client: (client.served, client.queue.peek().number))


@dataclass(slots=True)
class _Running:
    request: Request
    client: _Client
    num_paid: int  # its tokens up to here are counted


@dataclass(slots=True)
class _Line:
    """A lane as `FairRequestQueue.__iter__` plays it through."""

    served: float
    clients: list[tuple[float, list[Request]]]


class FairRequestQueue:
    """The next request is of the lane, and in it of the client, that was served least.

    What counts is tokens computed, prompt and output, without those found in the cache and without what is computed
    again after a preemption. A prompt counts as soon as its request starts. Who comes, or comes back, begins with the
    least of those that wait: nobody saves up. So a client's first request waits for at most one request of each other
    client of its lane. With one client and one lane the order is that of arrival. A client's own requests go by
    priority, then by arrival.
    """

    def __init__(self, weights: Mapping[str, float] = LANE_WEIGHTS) -> None:
        self._lanes = {name: _Lane(weights[name]) for name in LANES}
        self._classes = {name: index for index, name in enumerate(LANES)}
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, _Running] = {}
        self._paid: dict[str, int] = {}  # of preempted requests
        self._floor = 0.0  # as `_Lane.floor`, among the lanes

    def add(self, request: Request) -> None:
        lane = self._lanes[request.lane]
        client = self._client(lane, request.client)
        if not lane.num_waiting:
            lane.served = max(lane.served, self._floor)
        if not client.queue:
            client.served = max(client.served, lane.floor)
        client.queue.add(request)
        lane.num_waiting += 1
        self._waiting[request.request_id] = request

    def prepend(self, request: Request) -> None:
        running = self._running.get(request.request_id)
        if running is not None:
            self.release(request)
            self._paid[request.request_id] = running.num_paid
        self.add(request)

    def peek(self) -> Request:
        if not self._waiting:
            raise IndexError("no request is waiting")
        self._settle(self._running.values())
        return self._next_lane().next_client().queue.peek()

    def take(self, request: Request) -> None:
        self._leave(request)
        lane = self._lanes[request.lane]
        client = lane.clients[request.client]
        self._floor = max(self._floor, lane.served)
        lane.floor = max(lane.floor, client.served)
        num_paid = self._paid.pop(request.request_id, request.num_computed_tokens)
        running = self._running[request.request_id] = _Running(request, client, num_paid)
        client.num_running += 1
        self._pay(running, request.num_tokens)

    def remove(self, request_id: str) -> None:
        self._leave(self._waiting[request_id])
        self._paid.pop(request_id, None)

    def release(self, request: Request) -> None:
        running = self._running.pop(request.request_id)
        self._settle((running,))
        running.client.num_running -= 1

    def set_aside(self, request: Request) -> None:
        self._leave(request)

    def add_back(self, request: Request) -> None:
        self.add(request)

    def standing(self, request: Request) -> Standing:
        return self._classes[request.lane], 0

    def outranks(self, running: Request) -> bool:
        better = LANES[: self._classes[running.lane]]
        return any(self._lanes[name].num_waiting for name in better)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Plays it through on copies, as if only prompts counted."""
        lanes = {name: _Line(lane.served, []) for name, lane in self._lanes.items() if lane.num_waiting}
        for name, line in lanes.items():
            clients = self._lanes[name].clients.values()
            line.clients = [(client.served, list(client.queue)) for client in clients if client.queue]
        while lanes:
            name = min(lanes, key=lambda name: lanes[name].served)
            line = lanes[name]
            at = min(range(len(line.clients)), key=lambda at: (line.clients[at][0], line.clients[at][1][0].number))
            served, (request, *others) = line.clients.pop(at)
            num_tokens = request.num_tokens - self._paid.get(request.request_id, 0)
            line.served += num_tokens / self._lanes[name].weight
            if others:
                line.clients.append((served + num_tokens, others))
            elif not line.clients:
                del lanes[name]
            yield request

    def _next_lane(self) -> _Lane:
        return min((lane for lane in self._lanes.values() if lane.num_waiting), key=lambda lane: lane.served)

    def _client(self, lane: _Lane, name: str) -> _Client:
        """A new client drives out those that are gone and owe nothing: as new ones they would stand no worse. When
        there are very many, it drives out all that are gone.
        """
        client = lane.clients.get(name)
        if client is None:
            least = lane.floor if len(lane.clients) < MAX_REMEMBERED else inf
            kept = {n: c for n, c in lane.clients.items() if not c.is_idle or c.served > least}
            lane.clients = kept | {name: (client := _Client())}
        return client

    def _leave(self, request: Request) -> None:
        del self._waiting[request.request_id]
        lane = self._lanes[request.lane]
        lane.clients[request.client].queue.take(request)
        lane.num_waiting -= 1

    def _settle(self, entries: Iterable[_Running]) -> None:
        for running in entries:
            num_computed = running.request.num_computed_tokens
            if num_computed > running.num_paid:
                self._pay(running, num_computed)

    def _pay(self, running: _Running, up_to: int) -> None:
        num_tokens = up_to - running.num_paid
        running.num_paid = up_to
        running.client.served += num_tokens
        lane = self._lanes[running.request.lane]
        lane.served += num_tokens / lane.weight
