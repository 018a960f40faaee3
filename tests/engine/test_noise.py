"""The sampling noise: uniform, independent along each of its arguments, and the same whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from inferd.engine.sampling.noise import splitmix64, uniform

COUNT = 1 << 16
BINS = 64
CHI_SQUARE_63 = 110.0  # 63 degrees of freedom: passed by all but about 2 in 10,000 fair draws


def draw(varied: str, count: int = COUNT, **fixed: int) -> NDArray[np.float64]:
    values = {"seed": 11, "position": 5, "stream": 0} | fixed
    columns = {name: np.full(count, value) for name, value in values.items()}
    columns[varied] = np.arange(count)
    if varied == "stream":
        seeds, positions = columns["seed"][:1].astype(np.uint64), columns["position"][:1]
        return np.concatenate([uniform(seeds, positions, stream) for stream in range(count)])
    return uniform(columns["seed"].astype(np.uint64), columns["position"], values["stream"])


def chi_square(counts: NDArray[np.int64]) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_published_outputs_of_the_hash() -> None:
    """The first outputs of the reference SplitMix64 for seed 1234567."""
    states = np.uint64(1234567) + np.arange(4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
    ]


@pytest.mark.parametrize(("varied", "count"), [("position", COUNT), ("seed", COUNT), ("stream", 1 << 11)])
def test_uniform_along_every_argument(varied: str, count: int) -> None:
    u = draw(varied, count)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert chi_square(np.bincount((u * BINS).astype(int), minlength=BINS)) < CHI_SQUARE_63


@pytest.mark.parametrize("neighbour", [{"seed": 12}, {"seed": 11 + 2**40}, {"stream": 1}])
def test_neighbours_are_independent(neighbour: dict[str, int]) -> None:
    mine, other = draw("position"), draw("position", **neighbour)
    pairs = (mine * 8).astype(int) * 8 + (other * 8).astype(int)
    assert chi_square(np.bincount(pairs, minlength=64)) < CHI_SQUARE_63


def test_consecutive_positions_are_independent() -> None:
    u = draw("position")
    pairs = (u[:-1] * 8).astype(int) * 8 + (u[1:] * 8).astype(int)
    assert chi_square(np.bincount(pairs, minlength=64)) < CHI_SQUARE_63
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.015


def test_alone_equals_batched() -> None:
    random = np.random.default_rng(0)
    seeds = random.integers(0, 2**64, 100, dtype=np.uint64)
    positions = random.integers(0, 2**20, 100)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(100)]
    assert uniform(seeds, positions).tolist() == alone
    assert len(set(alone)) == 100
