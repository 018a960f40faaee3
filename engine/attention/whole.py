"""Attention of rows that are whole in the step and see all of themselves: encoders, without a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_HALF = (torch.bfloat16, torch.float16)
_HEAD_MULTIPLE, _LARGEST_HEAD = 8, 256  # what the fused kernel over ragged rows takes


@dataclass(frozen=True)
class WholeRows:
    """How a step's tokens fall into rows."""

    lens: tuple[int, ...]
    starts: Tensor | None  # [n + 1] i32, on an accelerator

    @classmethod
    def of(cls, row_lens: Sequence[int], device: torch.device) -> WholeRows:
        lens = tuple(row_lens)
        if device.type == "cpu":
            return cls(lens, None)
        starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
        return cls(lens, starts.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else starts)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, rows: WholeRows, scale: float) -> Tensor:
    """softmax(q k^T * scale) v within each row; q, k, v[t, h, d] -> [t, h, d], contiguous.

    Half precision on an accelerator takes one launch for all rows, where this torch has it.
    """
    if rows.starts is not None and _varlen is not None and q.dtype in _HALF and _fits_fused(q.shape[-1]):
        longest = max(rows.lens)
        parts = (q.contiguous(), k.contiguous(), v.contiguous())
        out: Tensor = _varlen(*parts, rows.starts, rows.starts, longest, longest, scale=scale)
        return out
    return attend_each(q, k, v, rows, scale)


def attend_each(q: Tensor, k: Tensor, v: Tensor, rows: WholeRows, scale: float) -> Tensor:
    """One row after the other: the twin of the fused form. On a processor nothing was faster: gathering rows of like
    lengths into one call costs more than the calls that it saves."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length in rows.lens:
        row = slice(start, start + length)
        one_q, one_k, one_v = (
            x[row].transpose(0, 1).unsqueeze(0) for x in (q, k, v)
        )  # fused kernels want 4 dimensions
        attended = functional.scaled_dot_product_attention(one_q, one_k, one_v, scale=scale)
        out[row] = attended.squeeze(0).transpose(0, 1)
        start += length
    return out


def _fits_fused(head_size: int) -> bool:
    return head_size % _HEAD_MULTIPLE == 0 and head_size <= _LARGEST_HEAD


def _find_varlen() -> Callable[..., Any] | None:
    """torch's own; None where this version has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


_varlen = _find_varlen()
