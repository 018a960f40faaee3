"""The angles of rotary position embedding (Su et al., 2021), as one table that layers of one kind share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inferd.engine.config import RopeConfig


class RopeTable:
    """`cos_sin[num_positions, head_size]`, as `rope_table` gives it, for as many positions as were reserved.

    How long contexts get is known only when the KV cache is planned, long after the layers are built.
    """

    def __init__(self, rope: RopeConfig, head_size: int, num_positions: int, device: torch.device) -> None:
        self._rope = rope
        self._head_size = head_size
        self._device = device
        self.cos_sin = rope_table(rope, head_size, num_positions, device)

    def reserve(self, num_positions: int) -> None:
        """A table that has to grow is made anew, elsewhere in memory: call this before anything is captured."""
        if num_positions > len(self.cos_sin):
            self.cos_sin = rope_table(self._rope, self._head_size, num_positions, self._device)


def rope_table(rope: RopeConfig, head_size: int, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, head_size] float32: the cosines of each position's head_size / 2 angles, then their sines."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = _scaled(1.0 / rope.theta**exponents, rope)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _scaled(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    match rope.scaling:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow waves are stretched by `factor`, fast ones stay, those between are blended (Llama 3.1's own scheme).

    Fast: more than `high_freq_factor` turns within the original context; slow: fewer than `low_freq_factor`.
    """
    num_turns = rope.original_max_position * frequencies / (2 * math.pi)
    keep = (num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / rope.factor
