"""The seam between a model's attention layers and whatever attends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inferd.engine.core.kv.spec import KVSpec


@dataclass(frozen=True)
class BatchGeometry:
    """How the flat list of a step's tokens falls into rows (requests), for one KV group.

    Row r owns the next `query_lens[r]` tokens; they are the last of its `seq_lens[r]` tokens (context and query).
    """

    query_lens: list[int]  # > 0 each
    seq_lens: list[int]
    block_tables: Tensor  # [n, max_blocks] i32, row r valid up to ceil(seq_lens[r] / block_size)
    slots: Tensor  # [t] i64, where each token's key and value go; -1: nowhere
    positions: Tensor  # [t] i64
    shared_prefixes: list[tuple[int, list[int]]] = field(
        default_factory=list
    )  # (number of full blocks, rows), disjoint


Metadata = Any  # a backend's own: made by its `build`, read by its `attend`, opaque to everyone else


class AttentionBackend(ABC):
    """Attends from a step's queries to keys and values in paged memory, where `rope_store` has already put them."""

    name: str

    @abstractmethod
    def supports(self, spec: KVSpec, device: torch.device, window: int | None) -> str | None:
        """None when this backend can serve such a layer, else the reason against it."""

    @property
    @abstractmethod
    def page_sizes(self) -> tuple[int, ...]:
        """Tokens per page that it works with, the best first; empty when any will do."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, spec: KVSpec) -> tuple[int, ...]:
        """How one layer's raw bytes are viewed, in elements of `spec.dtype`."""

    @abstractmethod
    def build(self, geometry: BatchGeometry) -> Metadata:
        """Everything that a step's layers share: called once a step and KV group, on the host."""

    @abstractmethod
    def attend(
        self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention: q[t, hq, d] -> [t, hq, d], contiguous.

        With a window w, a query at position p sees the keys at (p - w, p].
        """
