"""One rank's part of a step of a model that pools: rows, inputs, forward pass, vectors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.config import EngineConfig
from inferd.engine.core.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from inferd.engine.errors import EngineError
from inferd.engine.pooling.forward import PoolingForward
from inferd.engine.pooling.params import PoolingInput
from inferd.engine.pooling.pooler import Pooler, Span
from inferd.engine.pooling.vectors import finish
from inferd.engine.worker.inputs import StepLayout, dummy_layout, lay_out_step
from inferd.engine.worker.rows import InputBatch

logger = logging.getLogger(__name__)

NOT_FINITE = (
    "the model computed NaN or infinite values for this text; when all of them end so, "
    "its weights are damaged or need another dtype"
)


@dataclass(frozen=True)
class _Pending:
    """A step between its two halves."""

    request_ids: list[str]  # whose texts are complete
    vectors: Tensor | None  # [m, d] f32


class PoolingRunner:
    """Stands in a worker where `ModelRunner` does in one that generates: `execute` and `sample` alternate.

    A request is done with the step that computes its last token; until then its chunks give nothing to the scheduler.
    """

    def __init__(self, config: EngineConfig, forward: PoolingForward, block_sizes: Sequence[int]) -> None:
        """`block_sizes`: of each KV group."""
        if config.pooler is None:
            raise ValueError("an engine that generates has a ModelRunner")
        self.forward = forward
        self.block_sizes = block_sizes
        self._config = config.pooler
        limits = config.scheduler
        self._batch = InputBatch(limits.max_num_seqs, limits.max_model_len, block_sizes)
        self._pooler = Pooler(config.pooler.pooling)
        self._inputs: dict[str, PoolingInput] = {}  # by request
        self._pending: _Pending | None = None

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> None:
        """Take the step in and compute the vectors that `sample` gives; a step may also only forget requests."""
        if self._pending is not None:
            raise RuntimeError("execute was called twice without sample in between")
        self._update_rows(output)
        self._pending = _Pending([], None)
        if output.num_scheduled_tokens:
            step = lay_out_step(self._batch, output)
            spans = self._spans(step)
            request_ids = [span.request_id for span in spans if span.is_last]
            self._pending = _Pending(request_ids, self._vectors(step, spans, self._token_types(step)))

    @torch.inference_mode()
    def sample(self, bitmask: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """A text whose vector is not finite gets an error in its place; its batch mates do not notice."""
        if self._pending is None:
            raise RuntimeError("sample was called without execute before it")
        pending, self._pending = self._pending, None
        output = ModelRunnerOutput({})
        if pending.vectors is None or not pending.request_ids:
            return output
        vectors = pending.vectors.cpu().numpy()
        finite = np.isfinite(vectors).all(axis=1)
        for request_id, vector, is_finite in zip(pending.request_ids, vectors, finite, strict=True):
            if is_finite:
                output.pooled[request_id] = finish(vector, self._inputs[request_id].params, self._config)
            else:
                logger.error("request %s: %s", request_id, NOT_FINITE)
                output.errors[request_id] = NOT_FINITE
        return output

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, num_rows: int) -> None:
        """A pass over made-up rows, as many of them as long as a request can get as there are tokens for; nothing is
        stored or remembered."""
        lens: list[int] = []
        left = num_tokens
        while left and len(lens) < num_rows:
            lens.append(min(left, self._batch.max_model_len))
            left -= lens[-1]
        step = dummy_layout(lens, self.block_sizes)
        ends = step.query_lens.cumsum().tolist()
        spans = [Span("", end - length, length, 0, True) for end, length in zip(ends, lens, strict=True)]
        self._vectors(step, spans, None)

    def _vectors(self, step: StepLayout, spans: Sequence[Span], token_types: NDArray[np.int64] | None) -> Tensor:
        pooled = self._pooler.pool(self.forward.run(step, token_types), spans)
        return self.forward.model.classify(pooled) if self._config.has_head else pooled

    def _spans(self, step: StepLayout) -> list[Span]:
        rows, batch = step.rows.tolist(), self._batch
        starts = (step.query_lens.cumsum() - step.query_lens).tolist()
        spans = []
        for row, start, length, seq_len in zip(
            rows, starts, step.query_lens.tolist(), step.seq_lens.tolist(), strict=True
        ):
            is_last = seq_len == batch.num_tokens[row]
            spans.append(Span(batch.request_ids[row], start, length, seq_len - length, bool(is_last)))
        return spans

    def _token_types(self, step: StepLayout) -> NDArray[np.int64] | None:
        """[t]; None when no row of the step has any but the first."""
        inputs = [self._inputs[request_id] for request_id in self._batch.request_ids[step.rows].tolist()]
        if not any(given.token_types for given in inputs):
            return None
        types, start = np.zeros(len(step.token_ids), np.int64), 0
        for given, length, seq_len in zip(inputs, step.query_lens.tolist(), step.seq_lens.tolist(), strict=True):
            if given.token_types:
                types[start : start + length] = given.token_types[seq_len - length : seq_len]
            start += length
        return types

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in (*output.finished_ids, *output.preempted_ids):
            self._batch.remove(request_id)
            self._pooler.forget(request_id)
            self._inputs.pop(request_id, None)
        for new in output.new:
            if new.pooling is None:
                raise EngineError(f"request {new.request_id!r} wants tokens of a model that pools")
            self._batch.add(new)
            self._inputs[new.request_id] = new.pooling
        self._batch.condense()
        self._batch.update(output.known)
