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
        if batch.edits is not None:
            logits = batch.edits.before_temperature(logits)
        if batch.random is None:
            ids = greedy(logits)
        elif batch.random.places is None:
            ids = _draw(logits, batch.random, batch.edits)
        else:
            ids = greedy(logits).index_copy_(0, batch.random.places, _draw(logits, batch.random, batch.edits))
        if batch.edits is not None and batch.edits.for_all_rows:
            ids = torch.where(logits.amax(dim=-1) == -torch.inf, NO_TOKEN, ids)
        return ids


def _draw(logits: Tensor, random: RandomRows, edits: LogitsEdits | None) -> Tensor:
    """logits[m, vocab], which are overwritten, -> ids[r]"""
    scaled = take_rows(logits, random.places).div_(random.temperature[:, None])
    if edits is not None:
        scaled = edits.after_temperature(scaled, None if random.places is None else random.rows)
    probs = torch.softmax(scaled, dim=-1)
    # A NaN, +inf, or nothing but -inf make a whole row of NaN.
    return _draw_from(probs, random).masked_fill_(probs[:, 0].isnan(), BROKEN)


def _draw_from(probs: Tensor, random: RandomRows) -> Tensor:
    """On an accelerator top-p is served by sorting: a rejected draw could be noticed only by waiting for it."""
    if probs.device.type == "cpu" or not random.any_top_p:
        return draw_by_rejection(probs, random)
    without = draw_by_rejection(probs, replace(random, any_top_p=False))
    return torch.where(random.top_p < 1.0, draw_by_sorting(probs, random), without)
