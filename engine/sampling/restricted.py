"""Draws of a token within top-k, top-p and min-p, without sorting the vocabulary.

Weights are probabilities times any factor, one a row.

What may be drawn is always a level set of the row's weights, so equal tokens stay or go together:
top-k keeps what fewer than k tokens are above, min-p what is at least that part of the best, and top-p, within those,
what less than that part of their mass is above.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from inferd.engine.sampling.batch import RandomRows

_BLOCK = 128  # tokens per block of the two-level sums


def draw_by_rejection(weights: Tensor, random: RandomRows) -> Tensor:
    """weights[r, vocab] f32 >= 0 to ids[r] i64. With top-p it looks at the device's results now and then, else never.

    A token is drawn from what top-k and min-p keep; when top-p does not keep it, neither does it keep anything that is
    not above it, so the next is drawn from what is above. What is accepted is distributed as if drawn from the kept
    alone, and mostly the first draw is: its chance is p or more. Rows that are out of retries are sorted.
    """
    kept = _above_floors(weights, random)
    sums = _block_sums(kept)
    ids = _draw(kept, sums, random.u[:, 0])
    if not random.any_top_p:
        return ids
    total = sums.sum(dim=-1)
    limit = torch.where(random.top_p < 1.0, random.top_p * total, torch.inf)
    pending = torch.arange(len(weights), device=weights.device)
    newest = ids
    for retry in range(1, random.u.shape[1]):
        higher = _masked(kept, torch.gt, kept.gather(1, newest[:, None]))
        sums = _block_sums(higher)
        rejected = (sums.sum(dim=-1) >= limit[pending]).nonzero()[:, 0]
        if not len(rejected):
            return ids
        pending, kept, sums = pending[rejected], higher[rejected], sums[rejected]
        if retry == random.u.shape[1] - 1:
            break
        newest = _draw(kept, sums, random.u[pending, retry])
        ids[pending] = newest
    ids[pending] = draw_by_sorting(weights[pending], _narrow(random, pending))
    return ids


def draw_by_sorting(weights: Tensor, random: RandomRows) -> Tensor:
    """The same distribution by the definition, from the last column of `u`. Never waits for the device."""
    kept, ids = _above_floors(weights, random).sort(dim=-1, descending=True, stable=True)
    mass = kept.double().cumsum(dim=-1)
    limit = torch.where(random.top_p < 1.0, random.top_p * mass[:, -1], torch.inf)[:, None]
    last = ((mass - kept) < limit).sum(dim=-1, keepdim=True) - 1
    edge = kept.gather(1, last.clamp(min=0))
    last = (kept >= edge).sum(dim=-1, keepdim=True) - 1  # its equals stay as well
    kept_mass = mass.gather(1, last.clamp(min=0))
    index, _ = _invert(torch.minimum(mass, kept_mass), random.u[:, -1] * kept_mass[:, 0])
    return ids.gather(1, index[:, None])[:, 0]


def _above_floors(weights: Tensor, random: RandomRows) -> Tensor:
    """Zero for what top-k and min-p do not keep."""
    floor: Tensor | None = None
    if random.any_min_p:
        floor = random.min_p * weights.amax(dim=-1)
    vocab_size = weights.shape[1]
    if random.max_top_k is not None and (width := min(random.max_top_k, vocab_size)) < vocab_size:
        best = weights.topk(width, dim=-1).values
        kth = best.gather(1, (random.top_k.clamp(max=width) - 1)[:, None])[:, 0]
        kth = torch.where(random.top_k <= width, kth, 0.0)
        floor = kth if floor is None else torch.maximum(floor, kth)
    return weights if floor is None else _masked(weights, torch.ge, floor[:, None])


def _masked(weights: Tensor, compare: Callable[..., Tensor], bound: Tensor) -> Tensor:
    """Zero where the comparison with bound[r, 1] does not hold. On a CPU five times as fast as `torch.where`."""
    return compare(weights, bound, out=torch.empty_like(weights)).mul_(weights)


def _block_sums(weights: Tensor) -> Tensor:
    """[r, vocab] f32 -> [r, blocks] f64: by blocks, so that a row is summed alike whatever else is in the batch."""
    return _blocks(weights).sum(dim=-1).double()


def _blocks(weights: Tensor) -> Tensor:
    missing = -weights.shape[1] % _BLOCK
    padded = functional.pad(weights, (0, missing)) if missing else weights
    return padded.view(len(weights), -1, _BLOCK)


def _draw(weights: Tensor, block_sums: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF in order of token ids, by blocks and then inside one of them: no scan over the whole vocabulary."""
    cdf = block_sums.cumsum(dim=-1)
    block, rest = _invert(cdf, u * cdf[:, -1])
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=weights.shape[1] - 1)).double()
    inside = torch.where(columns < weights.shape[1], inside, 0.0).cumsum(dim=-1)
    offset, _ = _invert(inside, rest)
    return (block * _BLOCK + offset).clamp(max=weights.shape[1] - 1)


def _invert(cdf: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cdf[r, n] is above target[r], and how far into that index the target lies.

    Such an index has mass of its own; a target at or above the whole mass is moved just below it, so that rounding
    never leads past the last index that has any. For a row of NaN the index means nothing, but it is one.
    """
    target = torch.minimum(target, torch.nextafter(cdf[:, -1], torch.zeros_like(target)))
    index = torch.searchsorted(cdf, target[:, None], right=True).clamp(max=cdf.shape[1] - 1)
    before = torch.where(index > 0, cdf.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index[:, 0], target - before[:, 0]


def _narrow(random: RandomRows, rows: Tensor) -> RandomRows:
    """For the given rows of [r]; the host's view of them stays that of all."""
    columns = (random.temperature, random.top_k, random.top_p, random.min_p, random.u)
    return RandomRows(
        random.rows,
        None,
        *(column[rows] for column in columns),
        max_top_k=random.max_top_k,
        any_top_p=random.any_top_p,
        any_min_p=random.any_min_p,
    )
