"""Which tokens of a step have an adapter, sorted so that those of one adapter lie behind each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NO_SLOT = -1
SMALL_TILE, LARGE_TILE = 16, 64  # tokens that one program of a kernel takes
_FEW_TOKENS = 512  # up to here adapters have few tokens each, and large tiles would be mostly empty


class Segment(NamedTuple):
    """The tokens `rows[start:end]` of one adapter."""

    slot: int
    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class HostRows:
    """`LoraRows` in main memory."""

    rows: NDArray[np.int64]  # [k]
    segments: tuple[Segment, ...]
    tiles: NDArray[np.int32]  # [m, 4]
    tile_size: int


@dataclass(frozen=True)
class LoraRows:
    """The k of a step's t tokens that have an adapter, and how they fall into tiles."""

    rows: Tensor  # [k] i64, indices of tokens in order of their slots
    segments: tuple[Segment, ...]  # empty where they are not known in main memory: then the tiles count
    tiles: Tensor  # [m, 4] i32: slot, first index in `rows`, number of tokens, rank; a slot of NO_SLOT is padding
    tile_size: int  # the most tokens of a tile


class AddLora(Protocol):
    """Contract: `reference.add_lora`."""

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int], lora: LoraRows) -> None: ...


def max_tiles(num_tokens: int, num_slots: int) -> int:
    """Small ones, into which so many tokens may fall."""
    return min(num_tokens, num_slots + num_tokens // SMALL_TILE)


def sort_rows(token_slots: NDArray[np.int64], ranks: Sequence[int], tile_size: int | None = None) -> HostRows:
    """token_slots[t]: each token's adapter slot, `NO_SLOT` for none. `ranks`: by slot, those in use at least.

    Tokens of one slot keep their order. `tile_size`: what suits so many tokens, where not given.
    """
    order = np.argsort(token_slots, kind="stable")
    rows = order[np.count_nonzero(token_slots == NO_SLOT) :]
    slots, starts, counts = np.unique(token_slots[rows], return_index=True, return_counts=True)
    tile_size = tile_size or (SMALL_TILE if len(rows) <= _FEW_TOKENS else LARGE_TILE)
    segments, tiles = [], []
    for slot, start, count in zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True):
        rank = ranks[slot]
        segments.append(Segment(slot, rank, start, start + count))
        tiles += [(slot, start + at, min(tile_size, count - at), rank) for at in range(0, count, tile_size)]
    return HostRows(rows, tuple(segments), np.array(tiles, np.int32).reshape(-1, 4), tile_size)
