"""Which blocks hold each row's tokens, for one KV group."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferd.engine.errors import EngineError


class BlockTable:
    """Column i of a row is the block of its tokens [i * block_size, (i + 1) * block_size); `num_blocks` are in use."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.ids = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        return [self.ids, self.num_blocks]

    def set(self, row: int, block_ids: list[int]) -> None:
        self.num_blocks[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: list[int]) -> None:
        """Raises EngineError when the row would hold more than max_model_len tokens need."""
        start = self.num_blocks[row]
        stop = start + len(block_ids)
        if stop > self.ids.shape[1]:
            raise EngineError(f"a row got {stop} blocks of {self.block_size} tokens, room is for {self.ids.shape[1]}")
        self.ids[row, start:stop] = block_ids
        self.num_blocks[row] = stop

    def gather(self, rows: NDArray[np.intp], num_columns: int) -> NDArray[np.int32]:
        """A copy [len(rows), num_columns]: a step may still run while this table already changes."""
        return self.ids[rows, :num_columns]

    def slots(self, rows: NDArray[np.intp], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the token at each position of each row lives: block id * block_size + offset."""
        columns = positions // self.block_size
        return self.ids[rows, columns] * np.int64(self.block_size) + (positions - columns * self.block_size)
