"""The choice of the greatest logit in plain torch."""

from __future__ import annotations

from torch import Tensor

BROKEN = -1  # in place of a token id


def greedy(logits: Tensor) -> Tensor:
    """logits[m, vocab] f32 to ids[m] i64 of the greatest, the first of equal ones.

    `BROKEN` for a row that has no greatest finite logit: a NaN, +inf, or all -inf. Never waits for the device.
    """
    ids = logits.argmax(dim=-1)  # a NaN is the greatest
    return ids.masked_fill_(~logits.gather(1, ids[:, None])[:, 0].isfinite(), BROKEN)
