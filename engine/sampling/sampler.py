"""Logits to token ids."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from inferd.engine.sampling.batch import RandomRows, SamplingBatch

PREFILTER_WIDTHS = (256, 4096)  # how many candidates top-k and top-p look at before they sort the whole vocabulary
BROKEN = -1  # in place of a token id
_CDF_BLOCK = 128  # tokens per block of the two-level inverse CDF


class Sampler:
    """Order: float32, ban stop tokens below min_tokens, greedy rows | temperature, top-k, top-p, inverse CDF.

    A row's token does not depend on its batch mates: every reduction used here goes row by row in an order of its own.
    Equal logits rank by token id, the smaller first.
    """

    def __init__(self, prefilter_widths: tuple[int, ...] = PREFILTER_WIDTHS) -> None:
        self._prefilter_widths = prefilter_widths

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """logits[m, vocab], which may be overwritten, to ids[m] i64.

        `BROKEN` for a row that has no greatest finite logit: a NaN, +inf, or all -inf.
        """
        logits = logits.float()
        if batch.banned is not None:
            logits[batch.banned] = float("-inf")
        finite = logits.amax(dim=-1).isfinite()  # amax passes a NaN on
        if finite.all():
            return self._sample(logits, batch)
        logits[~finite] = 0.0  # anything that the arithmetic below can bear
        return self._sample(logits, batch).masked_fill_(~finite, BROKEN)

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        if batch.all_greedy:
            return logits.argmax(dim=-1)
        token_ids = torch.empty(batch.num_rows, dtype=torch.int64, device=logits.device)
        if batch.greedy_rows:
            token_ids[batch.greedy_rows] = logits[batch.greedy_rows].argmax(dim=-1)
        if batch.plain is not None:
            token_ids[batch.plain.rows] = _sample_plain(_take(logits, batch.plain.rows), batch.plain)
        if batch.restricted is not None:
            part = _take(logits, batch.restricted.rows)
            token_ids[batch.restricted.rows] = _sample_restricted(part, batch.restricted, self._prefilter_widths)
        return token_ids


def _take(tensor: Tensor, rows: list[int] | Tensor) -> Tensor:
    """The rows, ascending; no copy when they are all there are."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _sample_plain(logits: Tensor, random: RandomRows) -> Tensor:
    """Inverse CDF in order of token ids, by blocks and then inside one of them: no scan over the whole vocabulary."""
    num_rows, vocab_size = logits.shape
    probs = torch.softmax(logits / random.temperature[:, None], dim=-1)
    blocks = functional.pad(probs, (0, -vocab_size % _CDF_BLOCK)).view(num_rows, -1, _CDF_BLOCK)
    cdf = blocks.sum(dim=-1).double().cumsum(dim=-1)
    block, rest = _invert(cdf, random.u * cdf[:, -1])
    inside = blocks[torch.arange(num_rows, device=logits.device), block].double().cumsum(dim=-1)
    offset, _ = _invert(inside, rest)
    return block * _CDF_BLOCK + offset


def _invert(cdf: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cdf[r, n] is above target[r], and how far into that index the target lies.

    Such an index has mass of its own; a target at or above the whole mass is moved just below it, so that rounding
    never leads past the last index that has any.
    """
    target = torch.minimum(target, torch.nextafter(cdf[:, -1], torch.zeros_like(target)))
    index = torch.searchsorted(cdf, target[:, None], right=True)
    before = torch.where(index > 0, cdf.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index[:, 0], target - before[:, 0]


def _sample_restricted(logits: Tensor, random: RandomRows, widths: tuple[int, ...]) -> Tensor:
    """Inverse CDF over the kept tokens, best first; a row climbs to a wider prefilter only when it has to."""
    vocab_size = logits.shape[1]
    probs = torch.softmax(logits / random.temperature[:, None], dim=-1)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    pending = torch.arange(len(logits), device=logits.device)
    for width in (*(width for width in widths if width < vocab_size), vocab_size):
        found, sure = _sample_best(_take(logits, pending), _take(probs, pending), _narrow(random, pending), width)
        token_ids[pending[sure]] = found[sure]
        pending = pending[~sure]
        if not len(pending):
            break
    return token_ids


def _narrow(random: RandomRows, rows: Tensor) -> RandomRows:
    tensors = (_take(tensor, rows) for tensor in (random.temperature, random.top_k, random.top_p, random.u))
    return RandomRows(random.rows, *tensors)


def _sample_best(logits: Tensor, probs: Tensor, random: RandomRows, width: int) -> tuple[Tensor, Tensor]:
    """Tokens drawn from the best `width`, and for which rows they are sure: all that is kept lies inside."""
    vocab_size = logits.shape[1]
    values, ids = _rank(logits, width)
    mass = probs.gather(1, ids).double().cumsum(dim=-1)
    top_k = random.top_k.clamp(max=vocab_size)[:, None]
    last = _last_kept(mass, top_k, random.top_p[:, None], vocab_size)
    kept_mass = mass.gather(1, last)
    index, _ = _invert(torch.minimum(mass, kept_mass), random.u * kept_mass[:, 0])
    token_ids = ids.gather(1, index[:, None])[:, 0]
    if width == vocab_size:
        return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
    # Tokens that equal the worst candidate may have been left out, so whatever is kept must rank above it.
    above_edge = values.gather(1, last) > values[:, -1:]
    return token_ids, (above_edge & ((top_k <= width) | (top_k == vocab_size)))[:, 0]


def _last_kept(mass: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int) -> Tensor:
    """[m, 1] rank of the last token of the smallest set that holds at least p of the top-k's mass; never below 0.

    mass[m, width] is cumulative, best first; top_k and top_p are [m, 1].
    """
    width = mass.shape[1]
    total = torch.where(top_k < vocab_size, mass.gather(1, top_k.clamp(max=width) - 1), 1.0)
    before = functional.pad(mass[:, :-1], (1, 0))
    kept = (before < top_p * total) & (torch.arange(width, device=mass.device) < top_k)
    return kept.sum(dim=-1, keepdim=True) - 1


def _rank(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` greatest logits of each row, greatest first and equal ones by id: values and ids [m, width]."""
    if width == logits.shape[1]:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
