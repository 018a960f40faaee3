"""A grammar's packed bitmask on logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FEW_WORDS = 0.25  # of a row: with so few words that allow anything, the row is built from what is allowed
_MIXED_WORDS = 0.25  # of all: with more that allow something and forbid something, all are unpacked


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: NDArray[np.int32]) -> None:
    """logits[m, vocab]: in `rows`[k] i64, all different, -inf where bitmask[k, ceil(vocab / 32)] has a 0. In place.

    Bit `id % 32` of word `id // 32` belongs to token `id`. Off the CPU the packed words travel to the device and are
    unpacked there. On a CPU that would cost more than the sampling: rows of grammars either allow few tokens or forbid
    few, so only the words with something in them are unpacked.
    """
    is_mixed = np.count_nonzero((bitmask != 0) & (bitmask != -1)) > _MIXED_WORDS * bitmask.size
    if logits.device.type != "cpu" or is_mixed:
        words = torch.tensor(bitmask)  # a copy: what came through a message is read-only
        apply_bitmask_reference(
            logits, rows.to(logits.device, non_blocking=True), words.to(logits.device, non_blocking=True)
        )
        return
    vocab_size = logits.shape[1]
    has_few = np.count_nonzero(bitmask, axis=1) <= _FEW_WORDS * bitmask.shape[1]
    forbidden = _positions(~bitmask, ~has_few, vocab_size)
    allowed = _positions(bitmask, has_few, vocab_size)
    logits[rows[forbidden[0]], forbidden[1]] = float("-inf")
    kept_rows = rows[allowed[0]]
    kept = logits[kept_rows, allowed[1]]
    logits.index_fill_(0, rows[torch.from_numpy(has_few)], float("-inf"))
    logits[kept_rows, allowed[1]] = kept


def apply_bitmask_reference(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """The same in plain torch, with `bitmask` and `rows` as tensors on the device of `logits`."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    bits = (bitmask[:, :, None] >> shifts) & 1
    banned = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(banned, float("-inf"))


def _positions(bitmask: NDArray[np.int32], rows: NDArray[np.bool_], vocab_size: int) -> tuple[Tensor, Tensor]:
    """The set bits of some rows: row and token id of each, i64."""
    row, word = np.nonzero((bitmask != 0) & rows[:, None])
    octets = np.ascontiguousarray(bitmask[row, word]).view(np.uint8).reshape(-1, 4)
    item, bit = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    token_id = word[item] * 32 + bit
    inside = token_id < vocab_size
    return torch.from_numpy(row[item][inside]), torch.from_numpy(token_id[inside])
