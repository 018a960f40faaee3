"""Low-rank parts of linear maps of few tokens in plain torch: all adapters at once.

On a processor a small matrix product costs its call, not its work. So every token meets the factors of every adapter,
and what is not of its own is masked between the two products. Factors must be finite: the mask makes zeros of one side
of a product, and zero times infinity is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferd.kernels.lora import reference
from inferd.kernels.lora.rows import LoraRows

MAX_TOKENS = 128  # times adapters: with more the work counts


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int], lora: LoraRows) -> None:
    """`reference.add_lora`."""
    segments = lora.segments
    if len(segments) < 2 or len(x) * len(segments) > MAX_TOKENS:
        reference.add_lora(y, x, a, b, sizes, lora)
        return
    if len(segments) < len(a):
        slots = torch.tensor([segment.slot for segment in segments], device=a.device)
        a, b = a.index_select(0, slots), b.index_select(0, slots)
    num_slots, max_rank, num_matrices, _ = a.shape
    inner = (x.to(a.dtype) @ a.flatten(0, 2).t()).view(len(x), num_slots, max_rank, num_matrices)
    own = inner.new_zeros(len(x), num_slots, dtype=torch.bool)
    for index, segment in enumerate(segments):  # they are in order of their slots
        own[lora.rows[segment.start : segment.end], index] = True
    inner.masked_fill_(~own[:, :, None, None], 0.0)
    factors = b.flatten(0, 1)
    offset = 0
    for index, size in enumerate(sizes):
        part = slice(offset, offset + size)
        y[:, part] += inner[..., index].flatten(1) @ factors[:, part]
        offset += size
