"""Low-rank parts of linears: the plain form against one product a token, and the Triton kernels against the plain form.

The kernels' own tests are those of the card, run here in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from inferd.kernels.lora import masked, reference
from inferd.kernels.lora.rows import LARGE_TILE, NO_SLOT, SMALL_TILE, AddLora, LoraRows, Segment, sort_rows
from inferd.kernels.select import build_add_lora

RANKS = (4, 8, 3)  # by slot
SIZES = (6, 2, 4)


def on_cpu(slots: Sequence[int], ranks: Sequence[int] = RANKS) -> LoraRows:
    host = sort_rows(np.array(slots, np.int64), ranks)
    return LoraRows(torch.from_numpy(host.rows), host.segments, torch.from_numpy(host.tiles), host.tile_size)


def token_by_token(x: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int], slots: Sequence[int]) -> Tensor:
    """What is added, by the definition."""
    added = torch.zeros(len(x), sum(sizes), dtype=x.dtype)
    for token, slot in enumerate(slots):
        offset = 0
        for index, size in enumerate(sizes):
            if slot != NO_SLOT:
                inner = a[slot, :, index] @ x[token]
                added[token, offset : offset + size] = inner @ b[slot, :, offset : offset + size]
            offset += size
    return added


@pytest.mark.parametrize("add_lora", [reference.add_lora, masked.add_lora], ids=["one by one", "all at once"])
@pytest.mark.parametrize(
    "slots",
    [[1], [0, 0, 0], [NO_SLOT, 2, 0, NO_SLOT, 1, 2, 0], [2, 0] * 3, [2, NO_SLOT, 1] * 90, [NO_SLOT] * 3],
    ids=str,
)
@pytest.mark.parametrize("sizes", [SIZES, (12,)], ids=str)
def test_each_token_gets_the_part_of_its_adapter(add_lora: AddLora, slots: list[int], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a = torch.randn(3, 8, len(sizes), 10, dtype=torch.float64)
    b = torch.randn(3, 8, 12, dtype=torch.float64)
    for slot, rank in enumerate(RANKS):
        a[slot, rank:] = 0
        b[slot, rank:] = 0
    x = torch.randn(len(slots), 14, dtype=torch.float64)[:, 2:12]
    y = torch.randn(len(slots), 12, dtype=torch.float64)
    expected = y + token_by_token(x, a, b, sizes, slots)
    without = [token for token, slot in enumerate(slots) if slot == NO_SLOT]
    before = y.clone()
    add_lora(y, x, a, b, sizes, on_cpu(slots))
    torch.testing.assert_close(y, expected)
    assert torch.equal(y[without], before[without])


def test_what_an_empty_slot_holds_does_no_harm() -> None:
    a, b = torch.full((2, 4, 1, 3), torch.nan), torch.full((2, 4, 5), torch.nan)
    a[1], b[1] = 1.0, 1.0
    x, y = torch.ones(3, 3), torch.zeros(3, 5)
    reference.add_lora(y, x, a, b, (5,), on_cpu([NO_SLOT, 1, NO_SLOT], ranks=(4, 4)))
    assert y.tolist() == [[0.0] * 5, [12.0] * 5, [0.0] * 5]


def test_tokens_of_one_adapter_lie_behind_each_other() -> None:
    host = sort_rows(np.array([2, NO_SLOT, 0, 2, 0]), RANKS)
    assert host.rows.tolist() == [2, 4, 0, 3]
    assert host.segments == (Segment(0, 4, 0, 2), Segment(2, 3, 2, 4))
    assert host.tiles.tolist() == [[0, 0, 2], [2, 2, 2]]
    nothing = sort_rows(np.full(3, NO_SLOT), RANKS)
    assert (nothing.rows.size, nothing.segments, nothing.tiles.shape) == (0, (), (0, 3))


@pytest.mark.parametrize(("num_tokens", "tile_size"), [(40, SMALL_TILE), (700, LARGE_TILE)])
def test_tiles_hold_tokens_of_one_adapter(num_tokens: int, tile_size: int) -> None:
    slots = np.arange(num_tokens) % 3
    host = sort_rows(slots, RANKS)
    assert host.tile_size == tile_size
    assert host.tiles[:, 2].max() <= tile_size
    covered = [place for _, first, count in host.tiles.tolist() for place in range(first, first + count)]
    assert covered == list(range(num_tokens))
    for slot, first, count in host.tiles.tolist():
        assert set(slots[host.rows[first : first + count]]) == {slot}


@pytest.mark.parametrize("add_lora", [reference.add_lora, masked.add_lora], ids=["one by one", "all at once"])
def test_factors_may_be_wider_than_activations(add_lora: AddLora) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 8, 1, 10), torch.randn(3, 8, 12)
    x, y = torch.randn(4, 10).bfloat16(), torch.randn(4, 12).bfloat16()
    slots = [1, NO_SLOT, 2, 1]
    expected = (y.float() + token_by_token(x.float(), a, b, (12,), slots)).bfloat16()
    add_lora(y, x, a, b, (12,), on_cpu(slots, ranks=(8, 8, 8)))
    torch.testing.assert_close(y, expected)


def test_what_is_chosen() -> None:
    assert build_add_lora(torch.device("cpu")) is masked.add_lora
    assert build_add_lora(torch.device("cpu"), "torch") is reference.add_lora
    assert build_add_lora(torch.device("cuda"), "torch") is reference.add_lora


def test_the_kernels_in_the_interpreter(interpret: Callable[..., None]) -> None:
    interpret("test_gpu_lora.py")
