"""The noise of sampling: one number per row from a counter-based hash, so there is no generator state to keep.

Whatever way a token is reached (alone, in a batch, in chunks, after preemption), its number is the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PLAIN = 0  # stream of ordinary sampling; speculation and the like take streams of their own
RETRIES = range(1, 9)  # streams for when the drawn token is not among those that top-p keeps

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_MUL_A = np.uint64(0xBF58476D1CE4E5B9)
_MUL_B = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = (np.uint64(shift) for shift in (27, 30, 31, 11))


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64], stream: int = PLAIN) -> NDArray[np.float64]:
    """u(seed, position, stream) in [0, 1), elementwise over [m] seeds and positions, with 53 random bits.

    `positions` is the index, within its request, of the token being sampled.
    """
    mixed = splitmix64(seeds)
    mixed = splitmix64(mixed ^ positions.astype(np.uint64))
    mixed = splitmix64(mixed ^ np.uint64(stream))
    return (mixed >> _S11).astype(np.float64) * 2.0**-53


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output that a SplitMix64 generator in state `x` gives next.

    A bijection of 64 bits; Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), with the
    multipliers of Stafford's variant 13.
    """
    z = x + _GOLDEN
    z = (z ^ (z >> _S30)) * _MUL_A
    z = (z ^ (z >> _S27)) * _MUL_B
    return z ^ (z >> _S31)
