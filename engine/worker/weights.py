"""The weights of a worker's model, which can be let go of and loaded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from inferd.engine.config import EngineConfig
from inferd.engine.loader.base import CheckpointTensors
from inferd.engine.loader.held import HeldCheckpoint
from inferd.engine.messages import WEIGHTS
from inferd.engine.worker.host_memory import tensor_bytes

M = TypeVar("M")


class LoadedWeights(Generic[M]):
    """Implements `TaggedMemory` by the loader: what comes back is a new model, at other addresses.

    At level 1 the checkpoint stays open and mapped, so that its pages are at hand for as long as the system does not
    need them; at level 2 it is closed.
    """

    tag = WEIGHTS

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        build: Callable[[CheckpointTensors | None], M],
        put: Callable[[M | None], None],
    ) -> None:
        """Loads. `build` makes the model, of these tensors or of what the model folder holds; `put` has it used, and,
        with None, no longer used by anybody. Raises LoadError."""
        self._device = device
        self._build = build
        self._put = put
        self._checkpoint = HeldCheckpoint(config)
        self._is_here = False
        self.num_bytes = 0
        self._load(None)

    @property
    def kept_bytes(self) -> int:
        return 0 if self._is_here else self._checkpoint.num_bytes

    def release(self, level: int) -> None:
        self._put(None)
        self._is_here = False
        if level == 1:
            self._checkpoint.read_ahead()
        else:
            self._checkpoint.close()

    def restore(self) -> None:
        self._checkpoint.open()
        self._load(self._checkpoint.tensors() if self._checkpoint.num_bytes else None)

    def close(self) -> None:
        """Idempotent; for a worker that ends."""
        self._put(None)
        self._checkpoint.close()

    def _load(self, tensors: CheckpointTensors | None) -> None:
        model = self._build(tensors)
        self.num_bytes = tensor_bytes(model, self._device)
        self._put(model)
        self._is_here = True
