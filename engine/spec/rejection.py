"""Which drafts stand.

The model has computed logits behind the last known token of a request and behind each of its drafts, and the sampler
has drawn a token from every one of them as it always does: within the request's own limits, with the noise u(seed,
position, stream) of that token's own position. A draft stands when it is the token that was drawn in its place and
those before it stand. The first that differs is replaced by what was drawn, and what lies behind it is of no use. When
all stand, the token drawn behind the last one comes on top.

This is rejection sampling (Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding",
2023; Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023) for drafters that are
sure of what they say. In the general form a draft d, drawn from q, is accepted with probability min(1, p(d) / q(d)),
and a rejected one is replaced by a draw from max(p - q, 0), normed. Here q is 1 for d: so d is accepted with
probability p(d), and replaced by a draw from p without d. Drawing x from p and asking whether x is d does precisely
that: x is d with probability p(d), and given that it is not, it is distributed as p without d. For a greedy row p is 1
for one token.

Since x does not depend on the drafts, a request with a seed says the same with speculation and without, whatever the
drafter says and however long its drafts are. The general form cannot have that: its tokens depend on what was drawn
from q. What it could accept more often with a drafter that draws, the sum of min(p, q) in place of p at the likeliest
token of q, is given up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_DRAFT = -3  # in place of a draft behind the last one; no token, nor anything that stands for one


@dataclass(frozen=True)
class DraftChecks:
    """Of a step in which some of n requests have drafts: what stands behind each of its m sampled rows.

    A request's rows follow one another: that of its last known token, then those of its drafts.
    """

    num_known: NDArray[np.int64]  # [m] tokens before the one that the row samples, drafts before it among them
    draft_ids: NDArray[np.int64]  # [m] the draft for it; `NO_DRAFT` in the last row of a request
    starts: NDArray[np.int64]  # [n] the first row of each request, ascending from 0


def count_standing(
    picked: NDArray[np.int64], checks: DraftChecks | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """From picked[m], negative for a row that got no token: each request's first row, and how many of its tokens stand,
    1 or more. Without `checks` each row is a request's only one.

    Only where the very first row got no token is one that is negative among them: further down, the drafts that stand
    are all that the request gets in this step, and in the next one the same row comes first.
    """
    places = np.arange(len(picked))
    if checks is None:
        return places, np.ones_like(places)
    differs = np.where(picked == checks.draft_ids, len(picked), places)
    first = np.minimum.reduceat(differs, checks.starts)
    counts = first - checks.starts + 1
    return checks.starts, counts - ((picked[first] < 0) & (counts > 1))


def standing_tokens(
    request_ids: Sequence[str], picked: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
) -> dict[str, list[int]]:
    """By request. `request_ids` are those of the m rows."""
    token_ids = picked.tolist()
    pairs = zip(starts.tolist(), counts.tolist(), strict=True)
    return {request_ids[start]: token_ids[start : start + count] for start, count in pairs}
