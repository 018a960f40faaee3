"""Timing of workloads on peers, side by side in one run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from inferd.engine.bench.peers import Peer
from inferd.engine.bench.workloads import Workload

ROUNDS = 2  # the best counts: this machine may be shared


@dataclass(frozen=True)
class Row:
    workload: str
    peer: str
    seconds: float
    tokens_per_s: float


def measure(
    peers: Sequence[Peer], workloads: Iterable[Workload], vocab_size: int, progress: Callable[[str], None]
) -> list[Row]:
    """Workload by workload, all peers in turn, so that a slow minute of the machine hits them alike."""
    rows: list[Row] = []
    for workload in workloads:
        best = {peer.name: float("inf") for peer in peers}
        for round_ in range(ROUNDS):
            for peer in peers:
                seconds = _one_round(peer, workload, vocab_size, round_)
                progress(f"{workload.name} {peer.name}: {workload.total_output_tokens / seconds:.1f} tok/s")
                best[peer.name] = min(best[peer.name], seconds)
        rows += [Row(workload.name, name, s, workload.total_output_tokens / s) for name, s in best.items()]
    return rows


def _one_round(peer: Peer, workload: Workload, vocab_size: int, round_: int) -> float:
    rng = random.Random(f"{workload.name} {round_}")
    prompts = workload.prompts(rng, vocab_size)
    if workload.primed:
        prefix = prompts[0][: workload.shared_tokens]
        peer.generate([[*prefix, 0]], Workload("prime", 1, workload.shared_tokens, 1, 1))
    began = time.perf_counter()
    peer.generate(prompts, workload)
    return time.perf_counter() - began
