"""What it costs an engine to tell of itself: the same work with and without a reader of its feed, in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from inferd.engine.bench.peers import Inferd
from inferd.engine.bench.workloads import Workload
from inferd.engine.messages import FeedUpdate

ROUNDS = 3  # of each kind


@dataclass(frozen=True)
class FeedCost:
    workload: str
    share: float  # of the engine's time that went into looking and into encoding what was found, in the best round
    updates_per_s: float
    speed_ratio: float  # tokens per second with a reader over those without, best rounds of both

    def __str__(self) -> str:
        return (
            f"feed at {self.workload}: {self.share:.2%} of the time for {self.updates_per_s:.1f} updates a second; "
            f"speed {self.speed_ratio:.3f} of that without a reader"
        )


class _Reader:
    """Stands for the one in the engine's process that sends updates on."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.num_updates = 0

    def __call__(self, update: FeedUpdate) -> None:
        began = time.perf_counter()
        msgspec.msgpack.encode(update)
        self.spent_s += time.perf_counter() - began + update.took_s
        self.num_updates += 1


def measure_feed_cost(peer: Inferd, workload: Workload, vocab_size: int, progress: Callable[[str], None]) -> FeedCost:
    """The order of the two kinds changes from round to round, so that a drift of the machine hits them alike."""
    watched: list[tuple[float, _Reader]] = []
    alone: list[float] = []
    for round_ in range(ROUNDS):
        for is_watched in (False, True) if round_ % 2 else (True, False):
            prompts = workload.prompts(random.Random(f"feed {round_} {is_watched}"), vocab_size)
            if is_watched:
                reader = _Reader()
                with peer.insight.watch(reader):
                    seconds = _seconds(peer, prompts, workload)
                watched.append((seconds, reader))
            else:
                seconds = _seconds(peer, prompts, workload)
                alone.append(seconds)
            progress(f"feed {'on' if is_watched else 'off'}: {workload.total_output_tokens / seconds:.1f} tok/s")
    best_s, reader = min(watched, key=lambda round_: round_[0])
    return FeedCost(workload.name, reader.spent_s / best_s, reader.num_updates / best_s, min(alone) / best_s)


def _seconds(peer: Inferd, prompts: list[list[int]], workload: Workload) -> float:
    began = time.perf_counter()
    peer.generate(prompts, workload)
    return time.perf_counter() - began
