"""Which ranks belong together, and what they exchange."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from inferd.engine.layers.parallel import GroupCoordinator, TensorParallel
from inferd.engine.worker.parallel_state import ParallelState, rank_groups


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({"tp": 1}, {"tp": [[0]]}),
        ({"tp": 4}, {"tp": [[0, 1, 2, 3]]}),
        ({"pp": 2, "tp": 2}, {"pp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}),
        (
            {"dp": 2, "pp": 2, "tp": 2},
            {
                "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
                "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
                "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            },
        ),
        ({"pp": 2, "tp": 3}, {"pp": [[0, 3], [1, 4], [2, 5]], "tp": [[0, 1, 2], [3, 4, 5]]}),
    ],
)
def test_rank_groups(sizes: dict[str, int], groups: dict[str, list[list[int]]]) -> None:
    assert rank_groups(sizes) == groups


def test_alone_every_collective_is_the_identity() -> None:
    group, x = ParallelState.alone().tp, torch.tensor([1.0, 2.0])
    for result in (group.all_reduce(x), group.all_gather(x), group.broadcast(x)):
        assert result is x
    tp = TensorParallel.over(group)
    assert (tp, tp.reduce(x), tp.gather(x)) == (TensorParallel(), x, x)


def test_several_ranks_need_a_connection() -> None:
    with pytest.raises(ValueError, match="2 ranks"):
        GroupCoordinator([0, 1], 0)
    with pytest.raises(ValueError, match="2 ranks"):
        TensorParallel(0, 2)


def test_collectives_between_processes() -> None:
    """Four ranks in two groups of two along each of two axes."""
    with os.fdopen(os.memfd_create("store"), "rb") as store:
        command = [sys.executable, "-P", "-m", "inferd.engine.testing.collectives"]
        ranks = [
            subprocess.Popen([*command, str(rank), str(store.fileno()), "cpu"], pass_fds=[store.fileno()])
            for rank in range(4)
        ]
        assert [rank.wait(100) for rank in ranks] == [0] * 4
