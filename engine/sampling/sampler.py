"""Logits to token ids."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inferd.engine.sampling.batch import RandomRows, SamplingBatch, take_rows
from inferd.engine.sampling.chain import LogitsEdits
from inferd.engine.sampling.restricted import draw_by_rejection, draw_by_sorting
from inferd.kernels.sampling.reference import BROKEN, greedy

NO_TOKEN = -2  # in place of a token id, where what the request forbids leaves nothing


class Sampler:
    """Order: float32; what the request changes (see `ProcessorChain`); greedy rows | temperature, argmax-invariant
    changes, min-p and top-k, top-p, draw.

    A row's token does not depend on its batch mates: every reduction used here goes row by row in an order of its own.
    """

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """logits[m, vocab], which may be overwritten, to ids[m] i64.

        `BROKEN` for a row that has no greatest finite logit: a NaN, +inf, or all -inf. `NO_TOKEN` for all -inf where
        requests change logits. On an accelerator nothing waits for it.
        """
        logits = logits.float()
        if batch.takes_the_greatest:
            return greedy(logits)
        if batch.edits is None or not batch.edits.for_all_rows:
            return self._pick(logits, batch)
        logits = batch.edits.before_temperature(logits)
        is_empty = logits.amax(dim=-1) == -torch.inf
        return self._pick(logits, batch).masked_fill_(is_empty, NO_TOKEN)

    @staticmethod
    def _pick(logits: Tensor, batch: SamplingBatch) -> Tensor:
        if batch.random is None:
            return greedy(logits)
        if batch.random.places is None:
            return _draw(logits, batch.random, batch.edits)
        return greedy(logits).index_copy_(0, batch.random.places, _draw(logits, batch.random, batch.edits))


def _draw(logits: Tensor, random: RandomRows, edits: LogitsEdits | None) -> Tensor:
    """logits[m, vocab], which are overwritten, -> ids[r]"""
    scaled = take_rows(logits, random.places).div_(random.temperature[:, None])
    if edits is not None:
        scaled = edits.after_temperature(scaled, None if random.places is None else random.rows)
    peak = scaled.amax(dim=-1, keepdim=True)  # it passes a NaN on
    # Weights up to 1 do as well as probabilities. In place: new memory of this size costs more than the arithmetic.
    weights = scaled.sub_(peak).exp_()
    return _draw_from(weights, random).masked_fill_(~peak[:, 0].isfinite(), BROKEN)


def _draw_from(weights: Tensor, random: RandomRows) -> Tensor:
    """On an accelerator top-p is served by sorting: a rejected draw could be noticed only by waiting for it."""
    if weights.device.type == "cpu" or not random.any_top_p:
        return draw_by_rejection(weights, random)
    without = draw_by_rejection(weights, replace(random, any_top_p=False))
    return torch.where(random.top_p < 1.0, draw_by_sorting(weights, random), without)
