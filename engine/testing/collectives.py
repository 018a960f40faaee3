"""One rank of a test of `GroupCoordinator`: checks every collective against what it must give, and exits with 0.

Run by `python -m` with its rank, the number of an inherited file through which the ranks find each other, and a device.
"""

from __future__ import annotations

import sys

import torch

from inferd.engine.worker.parallel_state import ParallelState

SIZES = {"pp": 2, "tp": 2}


def check(rank: int, store_path: str, device: torch.device) -> None:
    """Each rank's tensor is full of its own number, so that a result says who took part."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    state = ParallelState.join(rank, SIZES, device, store_path)
    for axis, other in {"tp": rank ^ 1, "pp": rank ^ 2}.items():
        group = state.group(axis)
        low, high = min(rank, other), max(rank, other)
        assert group.ranks == (low, high)
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            own = torch.full((3, 2), rank, dtype=dtype, device=device)
            assert group.all_reduce(own.clone()).tolist() == [[low + high] * 2] * 3
            assert group.broadcast(own.clone(), source=1).tolist() == [[high] * 2] * 3
            assert group.all_gather(own).tolist() == [[low, low, high, high]] * 3
            assert group.all_gather(own.t()).shape == (2, 6)  # not contiguous
            assert group.all_gather(own[0]).tolist() == [low, low, high, high]
        group.barrier()
    with torch.inference_mode():
        assert state.tp.all_reduce(torch.ones(5, device=device)).sum() == 10
    state.leave()


if __name__ == "__main__":
    own_rank, store_fd, kind = sys.argv[1:]
    own_device = torch.device(kind, int(own_rank)) if kind == "cuda" else torch.device(kind)
    check(int(own_rank), f"/proc/self/fd/{store_fd}", own_device)
