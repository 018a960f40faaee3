"""Which queue a scheduling policy means."""

from __future__ import annotations

from collections.abc import Callable

from inferd.engine.config import SchedulingPolicy
from inferd.engine.core.fair import FairRequestQueue
from inferd.engine.core.queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue

QUEUES: dict[SchedulingPolicy, Callable[[], RequestQueue]] = {
    "fair": FairRequestQueue,
    "fcfs": FCFSRequestQueue,
    "priority": PriorityRequestQueue,
}


def make_queue(policy: SchedulingPolicy) -> RequestQueue:
    return QUEUES[policy]()
