"""What the paged kernels share: where a tile of tokens lies, and the tile sizes that suit a card."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferd.kernels.cuda.device import Card

LOG2_E = 1.4426950408889634


@triton.jit
def find_pages(table, begin, end, lanes, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """The pages of the tokens begin + lanes: one where a tile fits into a page, else one for each token.

    A tile that fits must begin at a multiple of its size. Table entries from `end` on are not read. Loops look up the
    next tile's pages one step ahead: looked up in the same step they would cost the loads of keys and values half of
    their pipeline.
    """
    if TOKENS <= PAGE:
        pages = tl.load(table + begin // PAGE, mask=begin < end, other=0)
    else:
        tokens = begin + lanes
        pages = tl.load(table + tokens // PAGE, mask=tokens < end, other=0)
    return pages.to(tl.int64)


@triton.jit
def token_pointers(
    plane, pages, begin, lanes, dims, page_stride, slot_stride, PAGE: tl.constexpr, TOKENS: tl.constexpr
):
    """Addresses of the tokens begin + lanes in a plane of keys or values, [TOKENS, dims]."""
    if TOKENS <= PAGE:
        first = plane + (pages * page_stride + begin % PAGE * slot_stride)
        pointers = first + lanes[:, None] * slot_stride + dims[None, :]
    else:
        slots = pages * page_stride + (begin + lanes) % PAGE * slot_stride
        pointers = plane + slots[:, None] + dims[None, :]
    return pointers


@triton.jit
def normalised(sums, total, peak):
    """What a tile has gathered, as attention and as natural log-sum-exp; rows that saw nothing: zeros and -inf."""
    some = total > 0
    total = tl.where(some, total, 1.0)
    return sums / total[:, None], tl.where(some, (peak + tl.log2(total)) * 0.6931471805599453, float("-inf"))


@dataclass(frozen=True)
class Tile:
    """Query rows and tokens of one step, and how the compiler spreads and pipelines it."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def decode_tile(head_size: int, group: int, programs: int, dtype: torch.dtype, card: Card) -> Tile:
    """The rows are the query heads of one key head, 16 at least: the least that the tensor cores take.

    `programs`: rows times key heads. Where they leave multiprocessors without work, and are too many to be divided,
    larger tiles keep more of the memory busy. Measured on an H200.
    """
    rows = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(rows, 32, 4, 2)
    if card.capability < (9, 0):
        return Tile(rows, 64 if head_size <= 128 else 32, 4, 3)
    if head_size > 128:
        return Tile(rows, 32, 4, 4)
    return Tile(rows, 128, 4, 3) if card.num_sms / 2 < programs < card.num_sms else Tile(rows, 64, 4, 4)


def prefill_tile(head_size: int, max_rows: int, max_seq_len: int, page: int, dtype: torch.dtype, card: Card) -> Tile:
    """`max_rows`: the most query tokens times heads of a group that any sequence brings. Measured on an H200."""
    wanted = max(16, triton.next_power_of_2(max_rows))
    if dtype == torch.float32:
        return Tile(min(wanted, 32), 32 if head_size <= 128 else 16, 4, 1)
    if head_size > 128:
        return Tile(128, 64, 8, 2) if card.capability >= (9, 0) and wanted > 64 else Tile(min(wanted, 64), 32, 4, 2)
    if card.capability < (9, 0) or wanted <= 64 or head_size <= 64 or max_seq_len <= 1024:
        return Tile(min(wanted, 64), 64, 4, 2)
    return Tile(128, 128 if page >= 128 else 64, 8, 3)


def num_splits(programs: int, steps: int, wanted: int, most: int = 64) -> int:
    """Into how many parts to divide each of `programs`, which take up to `steps` steps, to have about `wanted`."""
    return max(1, min(wanted // max(programs, 1), steps, most))
