"""One rank's part of a step: rows, inputs, forward pass, sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.attention.base import AttentionBackend
from inferd.engine.attention.context import ForwardContext, forward_context
from inferd.engine.config import EngineConfig
from inferd.engine.core.kv.spec import KVCacheConfig
from inferd.engine.core.output import BlockIds, ModelRunnerOutput, NewRequest, SchedulerOutput
from inferd.engine.errors import NotSupported
from inferd.engine.models.base import CausalLM
from inferd.engine.params import SamplingParams
from inferd.engine.sampling.batch import SamplingBatch
from inferd.engine.sampling.sampler import BROKEN, Sampler
from inferd.engine.worker.inputs import StepInputs, dummy_inputs, prepare_inputs
from inferd.engine.worker.rows import InputBatch

logger = logging.getLogger(__name__)

NOT_FINITE = (
    "the model computed NaN or infinite logits for this request; when all requests end so, "
    "its weights are damaged or need another dtype"
)


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
class _Pending:
    """A step between its two halves."""

    logits: Tensor | None  # [m, vocab]; None when no row is sampled
    rows: NDArray[np.intp]  # [m]


class ModelRunner:
    """Follows the scheduler's differences in its persistent batch and runs the model over it.

    `execute` and `sample` alternate; either out of turn raises RuntimeError. A chunk that does not reach its request's
    last known token gives no token, and since noise is stateless it uses none up.
    """

    def __init__(
        self, config: EngineConfig, model: CausalLM, backend: AttentionBackend, kv: KVMemory, device: torch.device
    ) -> None:
        self._model = model
        self._backend = backend
        self._kv = kv
        self._groups = kv.groups
        self._device = device
        self.sampler: Callable[[Tensor, SamplingBatch], Tensor] = Sampler()  # logits[m, vocab] -> ids[m]; replaceable
        limits = config.scheduler
        self._batch = InputBatch(limits.max_num_seqs, limits.max_model_len, kv.block_sizes, config.model.eos_token_ids)
        self._pending: _Pending | None = None

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> None:
        """Take the step in and compute the logits that `sample` needs; a step may also only forget requests."""
        if self._pending is not None:
            raise RuntimeError("execute was called twice without sample in between")
        self._update_rows(output)
        if not output.num_scheduled_tokens:
            self._pending = _Pending(None, np.zeros(0, np.intp))
            return
        inputs = prepare_inputs(self._batch, output, self._device)
        hidden = self._forward(inputs)
        logits = self._model.compute_logits(hidden[inputs.logits_indices]) if len(inputs.sampled_rows) else None
        self._pending = _Pending(logits, inputs.sampled_rows)

    @torch.inference_mode()
    def sample(self, bitmask: Any | None = None) -> ModelRunnerOutput:
        """A request whose logits are no numbers gets an error in place of a token; its batch mates do not notice."""
        if bitmask is not None:
            raise NotSupported("sampling under a grammar's bitmask is not supported")
        if self._pending is None:
            raise RuntimeError("sample was called without execute before it")
        logits, rows, self._pending = self._pending.logits, self._pending.rows, None
        if logits is None:
            return ModelRunnerOutput({})
        batch = self._batch.sampling_batch(rows, self._device)
        token_ids = self.sampler(logits, batch).cpu().numpy()
        sampled = dict(zip(batch.request_ids, token_ids.tolist(), strict=True))
        errors = {request_id: NOT_FINITE for request_id, token_id in sampled.items() if token_id == BROKEN}
        if errors:
            logger.error("step without finite logits for %d of %d requests", len(errors), len(rows))
            rows, token_ids = rows[token_ids != BROKEN], token_ids[token_ids != BROKEN]
        self._batch.append_tokens(rows, token_ids)
        return ModelRunnerOutput({name: [token_id] for name, token_id in sampled.items() if name not in errors}, errors)

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, num_rows: int) -> None:
        """A forward pass and one sampling of each kind over made-up rows; nothing is stored or remembered.

        The first rows are as long as a request can get, the last have one token: the costliest mix there is.
        """
        inputs = dummy_inputs(self._dummy_query_lens(num_tokens, num_rows), self._kv.block_sizes, self._device)
        logits = self._model.compute_logits(self._forward(inputs)[inputs.logits_indices])
        batch = InputBatch(num_rows, 1, self._kv.block_sizes, ())
        kinds = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9))
        for row in range(num_rows):
            blocks: BlockIds = tuple([] for _ in self._kv.block_sizes)
            batch.add(NewRequest(str(row), [0], 1, kinds[row % len(kinds)], 0, blocks, 0))
        # What block 0 holds is anyone's guess, and so are these logits; the sampler refuses NaN.
        self.sampler(torch.zeros_like(logits), batch.sampling_batch(np.arange(num_rows), self._device))

    def _dummy_query_lens(self, num_tokens: int, num_rows: int) -> list[int]:
        query_lens, left = [], num_tokens - num_rows
        for _ in range(num_rows):
            more = min(left, self._batch.max_model_len - 1)
            query_lens.append(1 + more)
            left -= more
        return query_lens

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in (*output.finished_ids, *output.preempted_ids):
            self._batch.remove(request_id)
        for new in output.new:
            self._batch.add(new)
        self._batch.condense()
        self._batch.update(output.known)

    def _forward(self, inputs: StepInputs) -> Tensor:
        context = ForwardContext(
            backend=self._backend,
            metadata={group: self._backend.build(geometry) for group, geometry in enumerate(inputs.geometries)},
            slots={group: geometry.slots for group, geometry in enumerate(inputs.geometries)},
            kv_caches=self._kv.caches,
            groups=self._groups,
        )
        with forward_context(context):
            return self._model.forward(inputs.token_ids, inputs.positions)
