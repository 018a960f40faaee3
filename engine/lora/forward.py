"""Steps with adapters, and those without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from inferd.engine.lora.manager import WorkerAdapters
from inferd.engine.worker.forward import EagerForward, StepLogits
from inferd.engine.worker.graphs import GraphForward
from inferd.engine.worker.inputs import StepLayout
from inferd.kernels.lora.rows import SMALL_TILE

_WARMING = -1  # the id of an adapter that no request has


class LoraForward:
    """Implements `Forward`. Steps are replayed as those without adapters are, from captures of their own."""

    def __init__(self, forward: EagerForward | GraphForward, adapters: WorkerAdapters) -> None:
        self._graphs = forward if isinstance(forward, GraphForward) else None
        self._eager = forward.eager if isinstance(forward, GraphForward) else forward
        self._plain = forward
        self._adapters = adapters

    def run(self, step: StepLayout) -> StepLogits | None:
        if step.lora_ids is None:
            return self._plain.run(step)
        if self._graphs is not None and (key := self._graphs.find_lora(step)) is not None:
            rows = self._adapters.lay_out(step.lora_ids, step.query_lens, SMALL_TILE)
            return self._graphs.replay_lora(key, step, rows)
        with self._adapters.applied(self._adapters.lay_out(step.lora_ids, step.query_lens)):
            return self._eager.run(step)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._eager.compute_logits(hidden)

    def warm_up(self, step: StepLayout) -> None:
        """Run it as if all of its rows had an adapter of the largest rank."""
        self._adapters.load_zeros(_WARMING)
        self.run(replace(step, lora_ids=np.full(len(step.query_lens), _WARMING, np.int64)))
        self._adapters.unload(_WARMING)
