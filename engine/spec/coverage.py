"""What the draft model has stored in the blocks that it shares with the model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Coverage:
    """Per block, how many of its first tokens have keys and values of the draft model.

    The scheduler gives out blocks and lets requests find them by what the model itself has stored. The draft model may
    be behind that, because it was not asked to guess for the request that filled them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_stored = np.zeros(num_blocks, np.int32)

    def reset(self, block_ids: Iterable[int]) -> None:
        """They hold something else from now on."""
        self._num_stored[list(block_ids)] = 0

    def num_covered(self, block_ids: NDArray[np.int32]) -> int:
        """Of a request with this block table: its first tokens that are stored."""
        stored = self._num_stored[block_ids]
        partial = np.flatnonzero(stored < self._block_size)
        if not partial.size:
            return len(block_ids) * self._block_size
        return int(partial[0]) * self._block_size + int(stored[partial[0]])

    def store(self, block_ids: NDArray[np.int32], num_tokens: int) -> None:
        """All of the first `num_tokens` are stored, or will be before anybody reads them."""
        num_full = num_tokens // self._block_size
        self._num_stored[block_ids[:num_full]] = self._block_size
        rest = num_tokens % self._block_size
        if rest:
            last = block_ids[num_full]
            self._num_stored[last] = max(self._num_stored[last], rest)
