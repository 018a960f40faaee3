"""From a step's layout to the hidden states of all its tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.attention.base import AttentionBackend
from inferd.engine.attention.context import ForwardContext, forward_context
from inferd.engine.core.kv.spec import EncoderOnlySpec
from inferd.engine.models.base import PoolingModel
from inferd.engine.worker.forward import KVMemory
from inferd.engine.worker.inputs import StepInputs, StepLayout, to_inputs


class PoolingForward:
    """Runs a pooling model over steps, eagerly: none of them is a decode step that could be captured."""

    def __init__(self, model: PoolingModel, backend: AttentionBackend, kv: KVMemory, device: torch.device) -> None:
        self._model: PoolingModel | None = model
        self._backend = backend
        self._kv = kv
        self._device = device
        specs = model.kv_specs(1).values()
        self._sees_whole_rows = any(isinstance(spec, EncoderOnlySpec) for spec in specs)

    @property
    def model(self) -> PoolingModel:
        """Raises RuntimeError while its weights are not there."""
        if self._model is None:
            raise RuntimeError("the model's weights were given back and are not there yet")
        return self._model

    def take_model(self, model: PoolingModel | None) -> None:
        """Another one with the same layers; None: let go of it."""
        self._model = model

    def run(self, step: StepLayout, token_types: NDArray[np.int64] | None = None) -> Tensor:
        """hidden[t, h] of the step's t tokens, normed. Returns while the device may still be computing."""
        inputs = to_inputs(step, self._device)
        types = None if token_types is None else torch.from_numpy(token_types).to(self._device)
        with forward_context(self._context(step, inputs)):
            return self.model.forward(inputs.token_ids, inputs.positions, token_types=types)

    def _context(self, step: StepLayout, inputs: StepInputs) -> ForwardContext:
        backend = self._backend
        return ForwardContext(
            backend,
            {group: backend.build(geometry) for group, geometry in enumerate(inputs.geometries)},
            {group: geometry.slots for group, geometry in enumerate(inputs.geometries)},
            self._kv.caches,
            self._kv.groups,
            whole=backend.build_whole(step.query_lens.tolist(), self._device) if self._sees_whole_rows else None,
        )
