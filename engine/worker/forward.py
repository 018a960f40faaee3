"""From a step's layout to logits: the seam behind which a step runs eagerly or is replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inferd.engine.attention.base import AttentionBackend, Metadata
from inferd.engine.attention.context import ForwardContext, forward_context
from inferd.engine.core.kv.spec import KVCacheConfig
from inferd.engine.core.output import GraphUse
from inferd.engine.models.base import CausalLM
from inferd.engine.worker.inputs import StepLayout, to_inputs


@dataclass(frozen=True)
class KVMemory:
    """What `Worker` allocated: the plan and each layer's view."""

    config: KVCacheConfig
    caches: dict[str, Tensor]  # layer name → as the backend's `kv_cache_shape` says

    @property
    def block_sizes(self) -> list[int]:
        return [group.spec.block_size for group in self.config.groups]

    @property
    def groups(self) -> dict[str, int]:
        return {name: index for index, group in enumerate(self.config.groups) for name in group.layer_names}


@dataclass(frozen=True)
class StepLogits:
    """Good until the next step runs."""

    logits: Tensor  # [m, vocab] f32
    greedy_ids: Tensor | None = None  # [m] i64 as `sampler.greedy` gives them, where the step has computed them already
    graph: GraphUse | None = None  # that was replayed
    hidden: Tensor | None = None  # [t, h], with prompt spans only: all their logits at once may be too much memory


class Forward(Protocol):
    """Runs the model over a step's tokens."""

    def run(self, step: StepLayout) -> StepLogits | None:
        """None when no logits are wanted. Returns while the device may still be computing."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden[c, h] -> [c, vocab] f32"""
        ...


class EagerForward:
    """Launches every operation of every step: serves any step on any device, and is the twin of what is captured."""

    def __init__(self, model: CausalLM, backend: AttentionBackend, kv: KVMemory, device: torch.device) -> None:
        self._model: CausalLM | None = model
        self.backend = backend
        self.kv = kv
        self._device = device
        self._groups = kv.groups

    @property
    def model(self) -> CausalLM:
        """Raises RuntimeError while its weights are not there."""
        if self._model is None:
            raise RuntimeError("the model's weights were given back and are not there yet")
        return self._model

    def take_model(self, model: CausalLM | None) -> None:
        """Another one with the same layers; None: let go of it."""
        self._model = model

    def run(self, step: StepLayout) -> StepLogits | None:
        inputs = to_inputs(step, self._device)
        metadata = {group: self.backend.build(geometry) for group, geometry in enumerate(inputs.geometries)}
        slots = {group: geometry.slots for group, geometry in enumerate(inputs.geometries)}
        with forward_context(self.context(metadata, slots)):
            hidden = self.model.forward(inputs.token_ids, inputs.positions)
        whole = hidden if step.prompt_spans else None
        if not len(step.logits_indices):
            return None if whole is None else StepLogits(hidden.new_empty((0, 0), dtype=torch.float32), hidden=whole)
        if len(step.logits_indices) < len(step.token_ids):
            hidden = hidden[inputs.logits_indices]
        return StepLogits(self.model.compute_logits(hidden), hidden=whole)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(hidden)

    def launch(self, token_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """token_ids[n] i64, positions[n] i64 -> logits[n, vocab] f32, with no step to prepare."""
        with forward_context(context):
            return self.model.compute_logits(self.model.forward(token_ids, positions))

    def context(self, metadata: dict[int, Metadata], slots: dict[int, Tensor]) -> ForwardContext:
        """What attention layers see, given each KV group's metadata and slots."""
        return ForwardContext(self.backend, metadata, slots, self.kv.caches, self._groups)
