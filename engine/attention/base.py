"""The seam between a model's attention layers and whatever attends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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


@dataclass(frozen=True)
class StaticPrefixes:
    """Which rows of a captured batch share first blocks: persistent tensors that are filled before each replay.

    The first `lens[g]` tokens of all rows of group g lie in the same blocks, which every row's block table lists.
    """

    lens: Tensor  # [g] i32, in tokens, whole blocks; 0 for a group that is not in use
    starts: Tensor  # [g + 1] i32, group g has rows[starts[g] : starts[g + 1]]; ascending, equal where it has none
    rows: Tensor  # [n] i32, the sharing rows in order of their groups; the rest is not read
    row_group: Tensor  # [n] i32, -1 for a row that shares nothing
    max_len: int  # a bound of `lens`; it decides into how many parts a prefix is divided


@dataclass(frozen=True)
class StaticGeometry:
    """Persistent tensors of n rows with one query token each, for a launch that is captured once and replayed.

    Lengths and tables are whole: what a row shares counts as its own. A padding row has length 0: it reads nothing,
    and its output is finite.
    """

    block_tables: Tensor  # [n, max_blocks] i32
    seq_lens: Tensor  # [n] i32, 0 marks a padding row
    slots: Tensor  # [n] i64, -1 for a padding row
    positions: Tensor  # [n] i64
    max_seq_len: int  # a bound of `seq_lens`; it decides into how many parts a row is divided
    prefixes: StaticPrefixes | None = None  # None: nobody shares; layers with a window never do


Metadata = Any  # a backend's own: made by its `build`, read by its `attend`, opaque to everyone else


class AttentionBackend(ABC):
    """Attends from a step's queries to keys and values in paged memory, where `rope_store` has already put them."""

    name: str
    device_types: tuple[str, ...] | None = None  # the only ones that it can ever serve on; None: it does not depend

    @abstractmethod
    def supports(
        self, spec: KVSpec, device: torch.device, window: int | None, softcap: float | None = None
    ) -> str | None:
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

    def graph_metadata(self, static: StaticGeometry) -> Metadata | None:
        """Metadata whose `attend` may be captured in a CUDA graph: it launches the same kernels whatever the tensors
        hold, never waits for the device and copies nothing from the host. None: this backend cannot be captured."""
        return None

    def build_whole(self, row_lens: Sequence[int], device: torch.device) -> Metadata:
        """Everything that a step's layers share which see each row whole: called once a step, on the host."""
        raise NotImplementedError(f"{self.name} serves no attention without a KV cache; `supports` says so")

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, metadata: Metadata, scale: float) -> Tensor:
        """Each token attends to all of its row, nothing is kept: q, k, v[t, h, d] -> [t, h, d], contiguous."""
        raise NotImplementedError(f"{self.name} serves no attention without a KV cache; `supports` says so")

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: Metadata,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention: q[t, hq, d] -> [t, hq, d], contiguous.

        With a window w, a query at position p sees the keys at (p - w, p]. With a softcap c, a scaled score s counts as
        c * tanh(s / c).
        """
