"""Attention over dense keys that also returns its log-sum-exp.

torch has such an operator for the CPU, under a private name: it is probed once, and plain arithmetic stands in for it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def attend_with_lse(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(cap(scale * q @ keys.T)) @ values and the natural log-sum-exp of the scores, where
    cap(s) = softcap * tanh(s / softcap), the identity without a softcap.

    q[b, h, n, d], keys and values[b, h, L, d] without NaN, visible broadcastable to [b, h, n, L] or None for all
    -> (out[b, h, n, d], lse[b, h, n] f32). A query that sees nothing gives zeros and -inf.
    """
    on_cpu = q.device.type == "cpu" and softcap is None and q.shape[2] > 0
    if on_cpu and (operator := _flash_operator()) is not None:
        return _flash(operator, q, keys, values, scale, visible)
    return attend_plainly(q, keys, values, scale, visible, softcap)


def attend_plainly(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """`attend_with_lse` step by step, in float32."""
    scores = q.float() @ keys.float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return (weights @ values.float()).to(q.dtype), lse


def _flash(
    operator: Any, q: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    if visible is None:
        out, lse = operator(q, keys, values, scale=scale)
        return out, lse
    mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    out, lse = operator(q, keys, values, attn_mask=mask.expand(q.shape[0], -1, q.shape[2], -1), scale=scale)
    return out, lse.masked_fill(~visible.any(-1), -torch.inf)  # the operator says 0 for a query that sees nothing


@cache
def _flash_operator() -> Any | None:
    """The private operator, if it is there and does what `attend_plainly` does."""
    operator = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if operator is None:
        return None
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(2, 3, length, 16, generator=generator) for length in (4, 9, 9))
    visible = torch.ones(2, 1, 4, 9, dtype=torch.bool).tril(5)
    visible[1, 0, 2] = False
    try:
        results = _flash(operator, q, keys, values, 0.3, visible)
    except (RuntimeError, TypeError, ValueError):  # another signature in another torch
        return None
    expected = attend_plainly(q, keys, values, 0.3, visible)
    close = (torch.allclose(a, b, atol=1e-5) for a, b in zip(results, expected, strict=True))
    return operator if all(close) else None
