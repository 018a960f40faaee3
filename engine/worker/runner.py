"""One rank's part of a step: rows, inputs, forward pass, sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.config import EngineConfig
from inferd.engine.core.output import BlockIds, GrammarBitmask, ModelRunnerOutput, NewRequest, SchedulerOutput
from inferd.engine.layers.parallel import TensorParallel
from inferd.engine.params import SamplingParams
from inferd.engine.sampling.batch import SamplingBatch
from inferd.engine.sampling.chain import ProcessorChain
from inferd.engine.sampling.logprobs import RawLogprobs, prompt_chunk
from inferd.engine.sampling.plugins import find_processors
from inferd.engine.sampling.processors import ProcessorContext
from inferd.engine.sampling.sampler import NO_TOKEN, Sampler
from inferd.engine.spec.drafting import Drafting
from inferd.engine.spec.rejection import DraftChecks, count_standing, standing_tokens
from inferd.engine.worker.buffers import HostIds
from inferd.engine.worker.forward import Forward, StepLogits
from inferd.engine.worker.inputs import PromptSpan, dummy_layout, lay_out_step
from inferd.engine.worker.rows import InputBatch
from inferd.kernels.grammar.bitmask import apply_bitmask

logger = logging.getLogger(__name__)

NOT_FINITE = (
    "the model computed NaN or infinite logits for this request; when all requests end so, "
    "its weights are damaged or need another dtype"
)
NOTHING_LEFT = (
    "allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar of this request, taken together, "
    "leave no token to choose from"
)


@dataclass(frozen=True)
class _Pending:
    """A step between its two halves."""

    result: StepLogits | None  # of m rows; None when no logits are wanted
    rows: NDArray[np.intp]  # [m]
    prompt_spans: tuple[PromptSpan, ...] = ()
    checks: DraftChecks | None = None


class ModelRunner:
    """Follows the scheduler's differences in its persistent batch and runs the model over it.

    `execute` and `sample` alternate; either out of turn raises RuntimeError. A chunk that does not reach its request's
    last known token gives no token, and since noise is stateless it uses none up.
    """

    def __init__(
        self,
        config: EngineConfig,
        forward: Forward,
        block_sizes: Sequence[int],
        device: torch.device,
        tp: TensorParallel | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """`block_sizes`: of each KV group. `tp`: the ranks that run the same rows, when there are others. `drafting`:
        on one of them, where next tokens are guessed."""
        self.forward = forward
        self.block_sizes = block_sizes
        self._device = device
        self._own_sampler = Sampler()
        self.sampler: Callable[[Tensor, SamplingBatch], Tensor] = self._own_sampler  # logits[m, vocab] -> ids[m]
        limits = config.scheduler
        context = ProcessorContext(config.model.vocab_size, limits.max_num_seqs, config.model.eos_token_ids, device)
        processors = ProcessorChain(context, find_processors())
        self._batch = InputBatch(limits.max_num_seqs, limits.max_model_len, block_sizes, processors)
        self._host_ids = HostIds(limits.max_num_seqs * (1 + limits.num_speculative_tokens), device)
        self._tp = tp or TensorParallel()
        self._drafting = drafting
        self._pending: _Pending | None = None

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> None:
        """Take the step in and compute the logits that `sample` needs; a step may also only forget requests."""
        if self._pending is not None:
            raise RuntimeError("execute was called twice without sample in between")
        self._update_rows(output)
        if self._drafting is not None:
            self._drafting.begin(output, self._batch)
        if not output.num_scheduled_tokens:
            self._pending = _Pending(None, np.zeros(0, np.intp))
            return
        step = lay_out_step(self._batch, output)
        self._pending = _Pending(self.forward.run(step), step.sampled_rows, step.prompt_spans, step.checks)

    @torch.inference_mode()
    def sample(self, bitmask: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """A request that gets no token gets an error in its place; its batch mates do not notice."""
        if self._pending is None:
            raise RuntimeError("sample was called without execute before it")
        pending, self._pending = self._pending, None
        output = self._finish(pending, bitmask)
        if self._drafting is not None:
            output.drafts = self._drafting.finish(self._batch)
        return output

    def _finish(self, pending: _Pending, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        if pending.result is None:
            return ModelRunnerOutput({})
        result = pending.result if bitmask is None else self._restrict(pending.result, pending.rows, bitmask)
        output = self._sample(result, pending.rows, pending.checks) if len(pending.rows) else ModelRunnerOutput({})
        if pending.result.hidden is not None:
            for span in pending.prompt_spans:
                hidden = pending.result.hidden[span.start : span.start + len(span.target_ids)]
                num_top = int(self._batch.sampling.prompt_logprobs[span.row])
                chunk = prompt_chunk(span.first, span.target_ids, hidden, self.forward.compute_logits, num_top)
                output.prompt_logprobs[self._batch.request_ids[span.row]] = chunk
        return output

    def _sample(self, result: StepLogits, rows: NDArray[np.intp], checks: DraftChecks | None) -> ModelRunnerOutput:
        batch = self._batch.sampling_batch(rows, self._device, None if checks is None else checks.num_known)
        raw = RawLogprobs(result.logits, batch.logprobs)
        picked = self._tp.agree(self._pick(result, batch))
        gathered = raw.gather(picked)
        token_ids = self._host_ids.take(picked)
        starts, counts = count_standing(token_ids, checks)
        sampled = standing_tokens(batch.request_ids, token_ids, starts, counts)
        errors = {
            request_id: NOTHING_LEFT if last == NO_TOKEN else NOT_FINITE
            for request_id, (*_, last) in sampled.items()
            if last < 0
        }
        if errors:
            logger.error("step without a token for %d of %d requests: %s", len(errors), len(rows), set(errors.values()))
        last = np.maximum(token_ids[starts + counts - 1], 0)  # the next step may run these rows before anybody knows
        self._batch.append_tokens(rows[starts], last, counts)
        logprobs = raw.by_request(gathered, batch.request_ids)
        return ModelRunnerOutput(
            {name: own for name, own in sampled.items() if name not in errors},
            errors,
            {name: part.cut(0, len(sampled[name])) for name, part in logprobs.items()},
            num_corrupted=list(errors.values()).count(NOT_FINITE),
            graph=result.graph,
        )

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, num_rows: int) -> None:
        """A forward pass and one sampling of each kind over made-up rows; nothing is stored or remembered.

        The first rows are as long as a request can get, the last have one token: the costliest mix there is.
        """
        result = self.forward.run(dummy_layout(self._dummy_query_lens(num_tokens, num_rows), self.block_sizes))
        if result is None:
            raise RuntimeError("a step whose rows have all caught up gave no logits")
        batch = InputBatch(num_rows, 1, self.block_sizes)
        kinds = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9))
        for row in range(num_rows):
            blocks: BlockIds = tuple([] for _ in self.block_sizes)
            batch.add(NewRequest(str(row), [0], 1, kinds[row % len(kinds)], 0, blocks, 0))
        # What block 0 holds is anyone's guess, and so are these logits; the sampler refuses NaN.
        self.sampler(torch.zeros_like(result.logits), batch.sampling_batch(np.arange(num_rows), self._device))

    def _restrict(self, result: StepLogits, rows: NDArray[np.intp], bitmask: GrammarBitmask) -> StepLogits:
        """Before anything else looks at them, what a grammar forbids goes out of the logits.

        The bitmask's rows are in the scheduler's order and for requests under a grammar only.
        """
        places: dict[str, list[int]] = {}
        for row, request_id in enumerate(self._batch.request_ids[rows].tolist()):
            places.setdefault(request_id, []).append(row)
        unused = {name: iter(own) for name, own in places.items()}
        chosen = [(next(unused[name]), row) for row, name in enumerate(bitmask.request_ids) if name in unused]
        if not chosen:
            return result
        targets, sources = zip(*chosen, strict=True)
        apply_bitmask(result.logits, torch.tensor(targets), bitmask.words[list(sources)])
        return replace(result, greedy_ids=None)

    def _pick(self, result: StepLogits, batch: SamplingBatch) -> Tensor:
        is_replaced = self.sampler is not self._own_sampler
        if result.greedy_ids is None or is_replaced or not batch.takes_the_greatest:
            return self.sampler(result.logits, batch)
        return result.greedy_ids

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
        self._batch.place_drafts(output.drafts)
