"""Linear maps of few rows as Triton kernels: they read the weight once, as fast as memory gives it.

One row is a matrix-vector product on plain multiply-adds. Up to 16 rows go through the tensor cores with the weight as
the tall operand; the inner dimension is divided over programs so that every multiprocessor has a share of the weight,
and the program that finishes last adds the parts up, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.common.ops import Linear
from inferd.kernels.cuda.device import Card, card
from inferd.kernels.cuda.launch import Launcher
from inferd.kernels.cuda.prefetch import prefetch

MAX_ROWS = 16


@dataclass(frozen=True)
class Vector:
    """One row: each program takes `outputs` rows of the weight, `step` columns at a time."""

    outputs: int
    step: int
    num_warps: int


@dataclass(frozen=True)
class Tile:
    """Few rows: tiles of `outputs` by `step`, the inner dimension in `splits` parts."""

    outputs: int
    step: int
    splits: int
    num_warps: int
    num_stages: int


@triton.jit
def _vector_kernel(
    x,
    weight,
    bias,
    out,
    out_features,
    IN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, STEP)
    present = outputs < out_features
    source = weight + outputs.to(tl.int64)[:, None] * IN + columns[None, :]
    tile = tl.load(source, mask=present[:, None] & (columns < IN)[None, :], other=0.0)
    if DEPENDENT:  # only the weight may be read before the kernel ahead has written x
        gdc_wait()
    total = tl.zeros([OUTPUTS], tl.float32)
    for start in range(STEP, IN, STEP):
        ahead = tl.load(source + start, mask=present[:, None] & (start + columns < IN)[None, :], other=0.0)
        part = tl.load(x + start - STEP + columns).to(tl.float32)
        total += tl.sum(tile.to(tl.float32) * part[None, :], axis=1)
        tile = ahead
    last: tl.constexpr = (IN - 1) // STEP * STEP
    part = tl.load(x + last + columns, mask=last + columns < IN, other=0.0).to(tl.float32)
    total += tl.sum(tile.to(tl.float32) * part[None, :], axis=1)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=present, other=0.0).to(tl.float32)
    tl.store(out + outputs, total.to(out.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrivals,
    num_rows,
    row_stride,
    out_features,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    LINE: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, STEP)
    present = outputs < out_features
    live = rows < num_rows
    share: tl.constexpr = (IN + STEP * SPLITS - 1) // (STEP * SPLITS) * STEP
    first = split * share
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    source = weight + outputs.to(tl.int64)[:, None] * IN + columns[None, :]
    if DEPENDENT:
        last_row = tl.minimum(outputs, out_features - 1).to(tl.int64)[:, None] * IN
        lines = tl.minimum(first + tl.arange(0, AHEAD) * LINE, IN - 1)
        prefetch(weight + last_row + lines[None, :])
        gdc_wait()
    vectors = x + rows[None, :] * row_stride + columns[:, None]
    for start in range(first, min(first + share, IN), STEP):
        inside = start + columns < IN
        block = tl.load(source + start, mask=present[:, None] & inside[None, :], other=0.0)
        part = tl.load(vectors + start, mask=inside[:, None] & live[None, :], other=0.0)
        total = tl.dot(block, part, total)
    target = rows[None, :].to(tl.int64) * out_features + outputs[:, None]
    mask = present[:, None] & live[None, :]
    if SPLITS > 1:
        lanes = tl.arange(0, OUTPUTS)[:, None] * ROWS + rows[None, :]
        own = partial + tile * (SPLITS * OUTPUTS * ROWS) + lanes
        tl.store(own + split * (OUTPUTS * ROWS), total)
        tl.debug_barrier()  # every thread's part is written before this program is counted
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + tile, 0)  # ready for the next call
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for other in range(SPLITS):
                total += tl.load(own + other * (OUTPUTS * ROWS), cache_modifier=".cg")
            if HAS_BIAS:
                total += tl.load(bias + outputs, mask=present, other=0.0).to(tl.float32)[:, None]
            tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)
    else:
        if HAS_BIAS:
            total += tl.load(bias + outputs, mask=present, other=0.0).to(tl.float32)[:, None]
        tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)


_vector = Launcher(_vector_kernel)
_tile = Launcher(_tile_kernel)


def vector_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Vector) -> Tensor:
    """x[1, in], weight[out, in], bias[out] | None -> [1, out]."""
    out_features, in_features = weight.shape
    out = torch.empty((1, out_features), dtype=x.dtype, device=x.device)
    _vector(
        (triton.cdiv(out_features, plan.outputs), 1, 1),
        (x, weight, weight if bias is None else bias, out, out_features),
        {"IN": in_features, "OUTPUTS": plan.outputs, "STEP": plan.step, "HAS_BIAS": bias is not None},
        device=x.device,
        num_warps=plan.num_warps,
    )
    return out


def tile_linear(x: Tensor, weight: Tensor, bias: Tensor | None, arrivals: Tensor, plan: Tile) -> Tensor:
    """x[n, in] with n up to 16, weight[out, in], bias[out] | None -> [n, out].

    `arrivals`: zeros, i32, one for each tile of outputs, of this weight alone; they are zeros again afterwards.
    """
    num_rows = x.shape[0]
    out_features, in_features = weight.shape
    tiles = triton.cdiv(out_features, plan.outputs)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    num_parts = tiles * plan.splits * plan.outputs * MAX_ROWS if plan.splits > 1 else 0
    partial = torch.empty(num_parts, dtype=torch.float32, device=x.device)
    _tile(
        (tiles, plan.splits, 1),
        (x, weight, weight if bias is None else bias, out, partial, arrivals, num_rows, x.stride(0), out_features),
        {
            "IN": in_features,
            "ROWS": MAX_ROWS,
            "OUTPUTS": plan.outputs,
            "STEP": plan.step,
            "SPLITS": plan.splits,
            "LINE": 128 // x.dtype.itemsize,
            "AHEAD": 8,
            "HAS_BIAS": bias is not None,
        },
        device=x.device,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return out


def vector_plan(in_features: int) -> Vector:
    """128 bytes or so of the weight a thread and step. Measured on an H200."""
    if in_features > 8192:
        return Vector(outputs=1, step=4096, num_warps=4)
    step = min(4096, max(128, triton.next_power_of_2(in_features)))
    return Vector(outputs=min(16, 16384 // step), step=step, num_warps=8)


def tile_plan(out_features: int, in_features: int, card: Card) -> Tile | None:
    """One tile of 64 outputs and a part of its inner dimension for each multiprocessor.

    None where that leaves more than a tenth of them without work, or some with several: there cuBLAS is as fast, as
    measured on an H200 (3.1-3.9 TB/s against 2.7-3.7 where this has a plan, within 2 % of each other where not).
    """
    tiles = triton.cdiv(out_features, 64)
    splits = card.num_sms // tiles
    if tiles * splits < 0.9 * card.num_sms or in_features < splits * 1024:
        return None
    return Tile(outputs=64, step=128, splits=splits, num_warps=4, num_stages=6 if card.capability >= (9, 0) else 4)


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Over the weight as it lies, dense `[out, in]`; more than 16 rows go through cuBLAS."""
    out_features, in_features = weight.shape
    vector = vector_plan(in_features)
    tile = tile_plan(out_features, in_features, card(weight.device))
    num_tiles = triton.cdiv(out_features, tile.outputs) if tile is not None else 0
    arrivals = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)
    dense = torch.nn.functional.linear

    def linear(x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows == 1:
            return vector_linear(x, weight, bias, vector)
        if tile is not None and 1 < num_rows <= MAX_ROWS:
            return tile_linear(x, weight, bias, arrivals, tile)
        return dense(x, weight, bias)

    return linear
