"""Ranks on cards: what they exchange through NCCL, eagerly and in a graph, and a whole engine over two of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inferd.engine.build import build_engine
from inferd.engine.config import EngineArgs
from inferd.engine.layers.parallel import GroupCoordinator
from inferd.engine.params import SamplingParams
from inferd.engine.testing.jobs import Job, run_jobs
from inferd.engine.testing.random_checkpoint import make_random_checkpoint
from inferd.engine.worker.parallel_state import BACKENDS
from inferd.kernels.cuda.device import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(interpreted() or not torch.cuda.is_available(), reason="no CUDA card"),
]
NUM_CARDS = torch.cuda.device_count()


@pytest.fixture
def lone_group(tmp_path: Path) -> Iterator[GroupCoordinator]:
    """One rank that talks to itself through NCCL."""
    dist.init_process_group(BACKENDS["cuda"], init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = GroupCoordinator([0], 0, dist.new_group([0]))
    group.all_reduce(torch.zeros(1, device="cuda"))
    yield group
    dist.destroy_process_group()


def test_collectives_in_a_graph(lone_group: GroupCoordinator) -> None:
    source = torch.zeros(4, 6, device="cuda")

    def step() -> torch.Tensor:
        doubled = lone_group.all_reduce(source * 2)
        return lone_group.broadcast(lone_group.all_gather(doubled))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    for value in (1.0, 3.0):
        source.fill_(value)
        graph.replay()
        assert torch.equal(result, torch.full_like(source, 2 * value))


@pytest.mark.skipif(NUM_CARDS < 4, reason="needs four cards")
def test_collectives_between_cards() -> None:
    with os.fdopen(os.memfd_create("store"), "rb") as store:
        command = [sys.executable, "-P", "-m", "inferd.engine.testing.collectives"]
        ranks = [
            subprocess.Popen([*command, str(rank), str(store.fileno()), "cuda"], pass_fds=[store.fileno()])
            for rank in range(4)
        ]
        assert [rank.wait(100) for rank in ranks] == [0] * 4


def answers(folder: Path, **options: Any) -> dict[str, list[int]]:
    fixed: dict[str, Any] = dict(device="cuda", dtype="float32", kernels="torch", memory_fraction=0.2)
    core, _ = build_engine(EngineArgs(str(folder), max_model_len=128, **(fixed | options)))
    greedy, seeded = SamplingParams(temperature=0.0), SamplingParams(seed=3)
    jobs = [Job(f"job-{at}", tuple(range(at, 40)), greedy if at % 2 else seeded) for at in range(6)]
    try:
        return run_jobs(core, jobs).tokens
    finally:
        core.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("parallel") / "model", head_dim=64)


@pytest.mark.parametrize("cudagraph_mode", ["NONE", "auto"])
def test_a_worker_process_with_a_card(folder: Path, cudagraph_mode: str) -> None:
    here = answers(folder, cudagraph_mode=cudagraph_mode)
    assert answers(folder, cudagraph_mode=cudagraph_mode, executor="multiproc") == here


@pytest.mark.skipif(NUM_CARDS < 2, reason="needs two cards")
@pytest.mark.parametrize("cudagraph_mode", ["NONE", "auto"])
def test_two_cards_answer_as_one(folder: Path, cudagraph_mode: str) -> None:
    alone = answers(folder, cudagraph_mode="NONE")
    assert answers(folder, cudagraph_mode=cudagraph_mode, tensor_parallel_size=2) == alone
