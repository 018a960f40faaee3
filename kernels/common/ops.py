"""The operations that a model is made of, as one frozen value: what to call, chosen once for a device and a dtype.

A layer gets an `Ops` at construction and never branches on the device. Every operation has a plain-torch twin in a
`reference.py` of its folder; the twin is its specification and its fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

KernelChoice = Literal["auto", "native", "torch"]


class KernelUnavailable(Exception):
    """An explicit choice of kernels cannot be served; the message says why and what else can be chosen."""


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddRmsNorm(Protocol):
    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...


class RopeStore(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None: ...


class PagedDecode(Protocol):
    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class PagedPrefill(Protocol):
    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class PrefixAttend(Protocol):
    def __call__(
        self, q: Tensor, kv_cache: Tensor, block_ids: Tensor, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]: ...


class MergeLse(Protocol):
    def __call__(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor: ...


Linear = Callable[[Tensor], Tensor]  # x[n, in] -> [n, out]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]
MakeLogits = Callable[[Tensor], Linear]


@dataclass(frozen=True)
class Ops:
    """One callable per operation; each field's full contract is the docstring of its twin.

    `x`, `q`, `k` and `v` may be views with any row stride as long as their last dimension is dense (q, k, v: the last
    two). Outputs are new and contiguous. `kv_cache` is one layer's `[2, num_blocks, block_size, num_kv_heads,
    head_size]`, keys then values; the slot of a token is `block_id * block_size + offset`.
    """

    rms_norm: RmsNorm  # x[..., h], weight[h] of x's dtype or float32 -> [..., h]
    add_rms_norm: AddRmsNorm  # x[n, h], residual[n, h], weight[h] -> (rms_norm(x + residual), x + residual)
    silu_mul: Callable[[Tensor], Tensor]  # gate_up[n, 2i], gate first -> [n, i]
    gelu_mul: Callable[[Tensor], Tensor]  # the same with GELU's tanh form
    rope_store: RopeStore  # rotates q and k in place, writes k and v at their slots
    make_linear: MakeLinear  # weight[out, in], bias[out] | None -> Linear; may keep or repack the weight
    make_logits: MakeLogits  # weight[vocab, in] -> a Linear whose results are float32
    paged_decode: PagedDecode  # one query token a row -> (out[n, hq, d], lse[n, hq] f32)
    paged_prefill: PagedPrefill  # any number of query tokens a row -> (out[t, hq, d], lse[t, hq] f32)
    prefix_attend: PrefixAttend  # every row over the same full blocks -> (out[n, hq, d], lse[n, hq] f32)
    merge_lse: MergeLse  # two partial attentions -> [n, hq, d]
    decisions: tuple[str, ...] = ()  # one sentence per choice, for the log and the doctor

    def describe(self) -> str:
        """The decisions as lines of text."""
        return "\n".join(self.decisions)
