"""Captured steps without a card: a backend that reads persistent tensors, and a recorder that launches again."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.attention.base import BatchGeometry, Metadata, StaticGeometry
from inferd.engine.attention.torch import TorchBackend
from inferd.engine.worker.forward import StepLogits
from inferd.engine.worker.graphs import Launch


class StaticTorch(TorchBackend):
    """The plain backend over persistent tensors; what it may not read is NaN or out of bounds."""

    def graph_metadata(self, static: StaticGeometry) -> Metadata:
        return static

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: Metadata,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if not isinstance(metadata, StaticGeometry):
            return super().attend(q, kv_cache, metadata, scale, window, softcap)
        count = int((metadata.seq_lens > 0).sum())
        assert not metadata.seq_lens[count:].any()
        assert (metadata.slots[count:] == -1).all()
        out = torch.zeros_like(q)
        if count:
            geometry = BatchGeometry(
                [1] * count,
                metadata.seq_lens[:count].tolist(),
                metadata.block_tables[:count],
                metadata.slots[:count],
                metadata.positions[:count],
                self._shared(metadata, kv_cache.shape[2]),
            )
            out[:count] = super().attend(q[:count], kv_cache, self.build(geometry), scale, window, softcap)
        return out

    @staticmethod
    def _shared(static: StaticGeometry, block_size: int) -> list[tuple[int, list[int]]]:
        if static.prefixes is None:
            return []
        starts, lens = static.prefixes.starts.tolist(), static.prefixes.lens.tolist()
        groups = []
        for group, length in enumerate(lens):
            rows = static.prefixes.rows[starts[group] : starts[group + 1]].tolist()
            assert (static.prefixes.row_group[rows] == group).all()
            assert bool(rows) == bool(length)
            if rows:
                groups.append((length // block_size, rows))
        return groups


class Again:
    """Launches again; remembers what was recorded and what ran."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed: list[int] = []

    def record(self, launch: Launch) -> Launch:
        size = len(launch().logits)
        self.recorded += 1

        def replay() -> StepLogits:
            self.replayed.append(size)
            return launch()

        return replay

    def used_bytes(self) -> int:
        return 100 * self.recorded
