"""Low-rank parts of linear maps as two Triton kernels: down to the rank, then up again and onto the output.

Both work on tiles of tokens that have one adapter, so adapters may be mixed in a batch in any way (Chen et al.,
"Punica: Multi-Tenant LoRA Serving", 2023). A matrix of few rows is long, so its inner dimension is divided over
programs; the second kernel adds their parts up, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.cuda.device import card
from inferd.kernels.cuda.launch import Launcher
from inferd.kernels.lora.rows import SMALL_TILE, LoraRows

MAX_SIZES = 3  # matrices of one fused projection
_STEP, _LONG_STEP = 64, 256  # columns of the input at a time; the longer where a tile is small
_BLOCK = 64  # outputs of one program
_SUMMANDS = 8192  # of the parts, that a program adds up in registers
_LEAST = 16  # what a tensor core takes of each dimension


@triton.jit(do_not_specialize=["row_stride", "num_rows", "splits"])
def _down_kernel(
    x,
    a,
    inner,
    rows,
    tiles,
    row_stride,
    num_rows,
    splits,
    IN: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MATRICES: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    tile = tiles + tl.program_id(0) * 4
    slot = tl.load(tile)
    if slot < 0:
        if DEPENDENT:  # a kernel that ends before the one ahead of it would let the next one start too early
            gdc_wait()
        return
    matrix = tl.program_id(1)
    split = tl.program_id(2)
    lanes = tl.arange(0, TILE)
    ranks = tl.arange(0, RANKS)
    columns = tl.arange(0, STEP)
    live = lanes < tl.load(tile + 2)
    present = ranks < tl.load(tile + 3)
    places = tl.load(tile + 1) + lanes
    tokens = tl.load(rows + places, mask=live, other=0)
    share = tl.cdiv(IN, STEP * splits) * STEP
    first = split * share
    vectors = x + tokens[:, None] * row_stride + columns[None, :]
    factors = a + slot.to(tl.int64) * (MAX_RANK * MATRICES * IN) + (ranks[:, None] * MATRICES + matrix) * IN
    factors += columns[None, :]
    factor = tl.load(factors + first, mask=present[:, None] & (first + columns < IN)[None, :], other=0.0)
    if DEPENDENT:  # adapters and rows do not change within a step; x does
        gdc_wait()
    total = tl.zeros([TILE, RANKS], tl.float32)
    for start in range(first, min(first + share, IN), STEP):
        ahead = start + STEP + columns < IN
        following = tl.load(factors + start + STEP, mask=present[:, None] & ahead[None, :], other=0.0)
        vector = tl.load(vectors + start, mask=live[:, None] & (start + columns < IN)[None, :], other=0.0)
        total = tl.dot(vector, tl.trans(factor), total, input_precision=PRECISION)
        factor = following
    target = inner + ((split * MATRICES + matrix) * num_rows + places).to(tl.int64)[:, None] * RANKS + ranks[None, :]
    tl.store(target, total, mask=live[:, None])


@triton.jit(do_not_specialize=["row_stride", "num_rows", "splits", "size_0", "size_1", "size_2"])
def _up_kernel(
    y,
    b,
    inner,
    rows,
    tiles,
    row_stride,
    num_rows,
    splits,
    size_0,
    size_1,
    size_2,
    MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MATRICES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    tile = tiles + tl.program_id(0) * 4
    slot = tl.load(tile)
    if slot < 0:
        if DEPENDENT:
            gdc_wait()
        return
    block = tl.program_id(1)  # lies within one matrix
    blocks_0 = tl.cdiv(size_0, BLOCK)
    blocks_1 = tl.cdiv(size_1, BLOCK)
    matrix = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    before = tl.where(matrix == 0, 0, tl.where(matrix == 1, blocks_0, blocks_0 + blocks_1))
    begin = tl.where(matrix == 0, 0, tl.where(matrix == 1, size_0, size_0 + size_1))
    end = begin + tl.where(matrix == 0, size_0, tl.where(matrix == 1, size_1, size_2))
    lanes = tl.arange(0, TILE)
    ranks = tl.arange(0, RANKS)
    parts = tl.arange(0, SPLITS)
    live = lanes < tl.load(tile + 2)
    present = ranks < tl.load(tile + 3)
    places = tl.load(tile + 1) + lanes
    tokens = tl.load(rows + places, mask=live, other=0)
    outputs = begin + (block - before) * BLOCK + tl.arange(0, BLOCK)
    inside = outputs < end
    size = size_0 + size_1 + size_2
    factors = b + (slot.to(tl.int64) * MAX_RANK + ranks)[:, None] * size + outputs[None, :]
    factor = tl.load(factors, mask=present[:, None] & inside[None, :], other=0.0)
    target = y + tokens[:, None] * row_stride + outputs[None, :]
    mask = live[:, None] & inside[None, :]
    if DEPENDENT:
        gdc_wait()
    sums = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    row = ((parts[:, None] * MATRICES + matrix) * num_rows + places[None, :]).to(tl.int64)
    wanted = (parts < splits)[:, None] & live[None, :]
    low = tl.load(inner + row[:, :, None] * RANKS + ranks[None, None, :], mask=wanted[:, :, None], other=0.0)
    low = tl.sum(low, axis=0)
    sums += tl.dot(low.to(factor.dtype), factor, input_precision=PRECISION)
    tl.store(target, sums.to(y.dtype.element_ty), mask=mask)


_down = Launcher(_down_kernel)
_up = Launcher(_up_kernel)


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int], lora: LoraRows) -> None:
    """`reference.add_lora`; sums are in float32 throughout."""
    num_rows, num_tiles = len(lora.rows), len(lora.tiles)
    if num_rows == 0:
        return
    _, max_rank, matrices, in_features = a.shape
    if matrices > MAX_SIZES:
        raise ValueError(f"a projection of {matrices} matrices; the kernel takes {MAX_SIZES}")
    ranks = max(_LEAST, triton.next_power_of_2(max_rank))
    most_splits = min(16, max(1, _SUMMANDS // (lora.tile_size * ranks)))
    splits = _splits(in_features, num_tiles * matrices, most_splits, card(x.device).num_sms)
    inner = torch.empty((splits, matrices, num_rows, ranks), dtype=torch.float32, device=x.device)
    common = {"MAX_RANK": max_rank, "RANKS": ranks, "MATRICES": matrices, "TILE": lora.tile_size}
    precision = {"PRECISION": "ieee" if x.dtype == torch.float32 else "tf32"}
    step = _LONG_STEP if lora.tile_size == SMALL_TILE and ranks <= 2 * _LEAST else _STEP
    _down(
        (num_tiles, matrices, splits),
        (x, a, inner, lora.rows, lora.tiles, x.stride(0), num_rows, splits),
        {"IN": in_features, **common, "STEP": step, **precision},
        device=x.device,
    )
    num_blocks = sum(triton.cdiv(size, _BLOCK) for size in sizes)
    padded = (*sizes, *(0,) * (MAX_SIZES - len(sizes)))
    _up(
        (num_tiles, num_blocks, 1),
        (y, b, inner, lora.rows, lora.tiles, y.stride(0), num_rows, splits, *padded),
        {**common, "SPLITS": most_splits, "BLOCK": _BLOCK, **precision},
        device=x.device,
    )


def _splits(in_features: int, num_programs: int, most: int, num_sms: int) -> int:
    """As many parts of the inner dimension as keep the card busy, each of several steps."""
    return max(1, min(most, in_features // (4 * _STEP), num_sms // num_programs))
