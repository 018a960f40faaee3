"""Low-rank parts of linear maps in plain torch: one adapter after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inferd.kernels.lora.rows import NO_SLOT, LoraRows, Segment


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int], lora: LoraRows) -> None:
    """`y += (x @ a[slot].T) @ b[slot]` for each token that has an adapter; y[t, sum(sizes)] is changed in place.

    x[t, in]. The output is `len(sizes)` matrices behind each other, each with a low-rank part of its own:
    a[slots, rank, len(sizes), in], b[slots, rank, sum(sizes)], scaled already, and read up to an adapter's own rank.
    All of one dtype. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4.1.
    """
    for slot, rank, start, end in lora.segments or _tiles(lora):
        is_whole = end - start == len(x)
        rows = lora.rows[start:end]
        own = x if is_whole else x.index_select(0, rows)
        inner = (own @ a[slot, :rank].flatten(0, 1).t()).view(len(own), rank, len(sizes))
        target = y if is_whole else y.index_select(0, rows)
        offset = 0
        for index, size in enumerate(sizes):
            part = slice(offset, offset + size)
            target[:, part] += inner[:, :, index] @ b[slot, :rank, part]
            offset += size
        if not is_whole:
            y.index_copy_(0, rows, target)


def _tiles(lora: LoraRows) -> list[Segment]:
    """In place of segments, where only the tiles are known."""
    return [Segment(slot, rank, at, at + count) for slot, at, count, rank in lora.tiles.tolist() if slot != NO_SLOT]
