"""A rank's adapters: their factors in main memory, and in slots of the layers' buffers while steps use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.config import EngineConfig, LoRAConfig
from inferd.engine.errors import EngineError, LoadError
from inferd.engine.layers.linear import ParallelLinear
from inferd.engine.layers.target import TORCH_DTYPES
from inferd.engine.lora.adapter import NO_ADAPTER
from inferd.engine.lora.config import read_adapter_config
from inferd.engine.lora.files import read_adapter
from inferd.engine.lora.layers import Factors, LinearPlan, LoraLinear, StepAdapters
from inferd.engine.lora.slots import SlotTable
from inferd.engine.models.base import Model
from inferd.engine.upload import upload
from inferd.kernels.lora import reference
from inferd.kernels.lora.rows import NO_SLOT, SMALL_TILE, AddLora, HostRows, LoraRows, sort_rows
from inferd.kernels.select import build_add_lora


@dataclass(frozen=True)
class _Loaded:
    rank: int
    factors: dict[str, dict[int, Factors]]  # by layer, then by matrix of it; this rank's part in the model's dtype


class WorkerAdapters:
    """Loads what it is told to load, and gives slots to what a step uses; who may run is the scheduler's business.

    Every rank is told the same in the same order, so slots are the same everywhere.
    """

    def __init__(self, config: LoRAConfig, device: torch.device, add_lora: AddLora) -> None:
        self._config = config
        self._device = device
        self._add_lora = add_lora
        self._plans: dict[str, LinearPlan] = {}  # by layer
        self._layers: dict[str, LoraLinear] = {}  # while there is a model
        self._slots = SlotTable(config.max_loras)
        self._ranks = [0] * config.max_loras  # by slot
        self._loaded: dict[int, _Loaded] = {}  # by adapter id
        self._step = StepAdapters()

    @classmethod
    def make(cls, config: EngineConfig, device: torch.device) -> WorkerAdapters | None:
        """None for an engine without adapters."""
        if config.lora is None:
            return None
        return cls(config.lora, device, build_add_lora(device, TORCH_DTYPES[config.dtype], config.kernels))

    @property
    def can_be_captured(self) -> bool:
        """Plain torch asks the host which tokens have which adapter."""
        return self._device.type == "cuda" and self._add_lora is not reference.add_lora

    def decision(self, *, captures: bool) -> str:
        """`captures`: steps without adapters are captured."""
        if self._add_lora is reference.add_lora:
            kernels = "plain torch"
        else:
            kernels = f"own {'Triton' if self._device.type == 'cuda' else 'C'} kernels"
        if not captures:
            return f"lora: {kernels}"
        how = "are captured too" if self.can_be_captured else "run eagerly"
        return f"lora: {kernels}; decode steps with adapters {how}"

    @property
    def num_slots(self) -> int:
        return self._config.max_loras

    def attach(self, model: Model) -> None:
        """Give the linears of a model that is ready to run their buffers."""
        for name, layer in model.weight_layers():
            if isinstance(layer, ParallelLinear) and (plan := LinearPlan.of(name, layer)) is not None:
                self._plans[name] = plan
                self._layers[name] = LoraLinear(plan, layer, self._config, self._step, self._add_lora)

    def detach(self) -> None:
        """The model is given up, and with it the buffers. What lies in main memory stays."""
        self._layers = {}
        self._slots.clear()

    def load(self, adapter_id: int, path: str) -> str:
        """Read an adapter's files; what they hold, as a digest. Raises LoadError or NotSupported, and keeps nothing."""
        folder = Path(path)
        config = read_adapter_config(folder, self._config.max_lora_rank)
        places = {
            matrix: (name, index) for name, plan in self._plans.items() for index, matrix in enumerate(plan.matrices)
        }
        tensors = read_adapter(
            folder, config, {matrix: self._plans[name].shape(index) for matrix, (name, index) in places.items()}
        )
        factors: dict[str, dict[int, Factors]] = {}
        for matrix, (a, b) in tensors.factors.items():
            name, index = places[matrix]
            plan = self._plans[name]
            a, b = plan.own_part(index, (a, b.float() * config.scale))
            factors.setdefault(name, {})[index] = (
                self._keep(matrix, a, plan.dtype),
                self._keep(matrix, b.t(), plan.dtype),
            )
        self._loaded[adapter_id] = _Loaded(config.rank, factors)
        return tensors.digest

    def load_zeros(self, adapter_id: int) -> None:
        """An adapter of the largest rank in every linear that changes nothing: for warming up."""
        rank = self._config.max_lora_rank
        factors = {
            name: {
                index: (torch.zeros(rank, plan.num_inputs), torch.zeros(rank, size))
                for index, size in enumerate(plan.sizes)
            }
            for name, plan in self._plans.items()
        }
        self._loaded[adapter_id] = _Loaded(rank, factors)

    def unload(self, adapter_id: int) -> None:
        """Of effect for steps that are executed from now on. Unknown ids are ignored."""
        self._loaded.pop(adapter_id, None)
        self._slots.release(adapter_id)

    def lay_out(
        self, adapter_ids: NDArray[np.int64], query_lens: NDArray[np.int64], tile_size: int | None = None
    ) -> HostRows:
        """A step's rows: adapter_ids[n], `NO_ADAPTER` for none; query_lens[n]. Its adapters have slots from now on."""
        ids, inverse = np.unique(adapter_ids, return_inverse=True)
        self._place([adapter_id for adapter_id in ids.tolist() if adapter_id != NO_ADAPTER])
        slots = [NO_SLOT if adapter_id == NO_ADAPTER else self._slots[adapter_id] for adapter_id in ids.tolist()]
        return sort_rows(np.array(slots, np.int64)[inverse].repeat(query_lens), self._ranks, tile_size)

    @contextmanager
    def applied(self, host: HostRows) -> Iterator[None]:
        """While the model runs over a step that was laid out so."""
        rows, tiles = upload((host.rows, host.tiles), self._device)
        with self._looking_at(LoraRows(rows, host.segments, tiles, host.tile_size)):
            yield

    @contextmanager
    def applied_later(self, rows: Tensor, tiles: Tensor) -> Iterator[None]:
        """While the model is captured: rows[size] i64 and tiles[m, 4] i32 will hold what `lay_out` gives, in small
        tiles, when it is replayed."""
        with self._looking_at(LoraRows(rows, (), tiles, SMALL_TILE), is_static=True):
            yield

    @contextmanager
    def _looking_at(self, rows: LoraRows, *, is_static: bool = False) -> Iterator[None]:
        self._step.rows, self._step.is_static = rows, is_static
        try:
            yield
        finally:
            self._step.rows, self._step.is_static = None, False

    def _place(self, adapter_ids: list[int]) -> None:
        for adapter_id in adapter_ids:
            if adapter_id not in self._loaded:
                raise EngineError(f"a step has rows with adapter {adapter_id}, which the worker does not hold")
        for adapter_id in self._slots.place(adapter_ids):
            slot, loaded = self._slots[adapter_id], self._loaded[adapter_id]
            self._ranks[slot] = loaded.rank
            for name, layer in self._layers.items():
                layer.fill(slot, loaded.factors.get(name, {}))

    def _keep(self, matrix: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        """A dense copy, from which a card can fetch by itself. Raises LoadError for what is not finite in `dtype`: it
        would end every request with the adapter."""
        kept = torch.empty(part.shape, dtype=dtype, pin_memory=self._device.type == "cuda").copy_(part)
        if not kept.isfinite().all():
            raise LoadError(f"the factors of {matrix} hold NaN or what is infinite in {dtype}")
        return kept
