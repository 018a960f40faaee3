"""Low-rank parts of linears: the plain form against one product a token, and the Triton kernels against the plain form.

The kernels' own tests are those of the card, run here in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from inferd.kernels.common.ops import Ops
from inferd.kernels.lora import reference
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
                inner = a[slot, : RANKS[slot], index] @ x[token]
                added[token, offset : offset + size] = inner @ b[slot, : RANKS[slot], offset : offset + size]
            offset += size
    return added


SLOTS = [
    [1],
    [0, 0, 0],
    [NO_SLOT, 2, 0, NO_SLOT, 1, 2, 0],
    [2, 0, 2] * 30,
    [NO_SLOT] * 3,
]


def factors(num_inputs: int, sizes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What lies beyond an adapter's rank is not read."""
    a = (torch.randn(3, 8, len(sizes), num_inputs) * num_inputs**-0.5).to(dtype)
    b = (torch.randn(3, 8, sum(sizes)) * 0.3).to(dtype)
    for slot, rank in enumerate(RANKS):
        a[slot, rank:] = torch.nan
        b[slot, rank:] = torch.nan
    return a, b


@pytest.mark.parametrize("slots", SLOTS, ids=str)
@pytest.mark.parametrize("sizes", [SIZES, (12,)], ids=str)
def test_each_token_gets_the_part_of_its_adapter(slots: list[int], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a, b = factors(10, sizes, torch.float64)
    x = torch.randn(len(slots), 14, dtype=torch.float64)[:, 2:12]
    y = torch.randn(len(slots), 12, dtype=torch.float64)
    expected = y + token_by_token(x, a, b, sizes, slots)
    before = y.clone()
    reference.add_lora(y, x, a, b, sizes, on_cpu(slots))
    torch.testing.assert_close(y, expected)
    without = [token for token, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.equal(y[without], before[without])


@pytest.fixture
def native_add_lora(native: Ops, kernel_cache: Path) -> AddLora:
    """Of this processor's kernels, where it has them."""
    return build_add_lora(torch.device("cpu"), torch.bfloat16, cache_dir=kernel_cache)


@pytest.mark.parametrize("slots", [*SLOTS, [1] * 300], ids=lambda slots: f"{len(slots)} tokens {slots[:7]}")
@pytest.mark.parametrize("sizes", [(70, 33, 17), (130,), (16, 16)], ids=str)
@pytest.mark.parametrize("num_inputs", [10, 100])
def test_the_c_kernel_equals_its_twin(
    native_add_lora: AddLora, slots: list[int], sizes: tuple[int, ...], num_inputs: int
) -> None:
    torch.manual_seed(0)
    a, b = factors(num_inputs, sizes, torch.bfloat16)
    x = torch.randn(len(slots), num_inputs + 6).bfloat16()[:, 2 : num_inputs + 2]
    y = torch.randn(len(slots), sum(sizes) + 3).bfloat16()[:, : sum(sizes)]
    expected, before = y.float(), y.clone()
    reference.add_lora(expected, x.float(), a.float(), b.float(), sizes, on_cpu(slots))
    native_add_lora(y, x, a, b, sizes, on_cpu(slots))
    torch.testing.assert_close(y.float(), expected, atol=2e-2, rtol=2e-2)
    without = [token for token, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.equal(y[without], before[without])


def test_the_c_kernel_checks_what_it_is_told(native_add_lora: AddLora) -> None:
    a, b = torch.zeros(3, 8, 1, 10, dtype=torch.bfloat16), torch.zeros(3, 8, 16, dtype=torch.bfloat16)
    x, y = torch.zeros(2, 10, dtype=torch.bfloat16), torch.zeros(2, 16, dtype=torch.bfloat16)
    rows = on_cpu([0, 1])
    with pytest.raises(TypeError, match="bfloat16"):
        native_add_lora(y.float(), x, a, b, (16,), rows)
    with pytest.raises(TypeError, match="dense"):
        native_add_lora(y, x, a.transpose(0, 1), b, (16,), rows)
    for wrong in (dict(y=y[:, :12]), dict(x=x[:, :8]), dict(b=b[:2])):
        with pytest.raises(ValueError, match="do not fit"):
            native_add_lora(**(dict(y=y, x=x, a=a, b=b, sizes=(16,), lora=rows) | wrong))  # type: ignore[arg-type]
    for tile in ([3, 0, 1, 4], [0, 2, 1, 4], [0, 0, 1, 9], [0, 1, 2, 4]):
        with pytest.raises(IndexError, match="outside"):
            native_add_lora(y, x, a, b, (16,), replace(rows, tiles=torch.tensor([tile], dtype=torch.int32)))
    with pytest.raises(IndexError, match="outside"):
        native_add_lora(y, x, a, b, (16,), replace(rows, rows=torch.tensor([0, 2])))


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
    assert host.tiles.tolist() == [[0, 0, 2, 4], [2, 2, 2, 3]]
    nothing = sort_rows(np.full(3, NO_SLOT), RANKS)
    assert (nothing.rows.size, nothing.segments, nothing.tiles.shape) == (0, (), (0, 4))


@pytest.mark.parametrize(("num_tokens", "tile_size"), [(40, SMALL_TILE), (700, LARGE_TILE)])
def test_tiles_hold_tokens_of_one_adapter(num_tokens: int, tile_size: int) -> None:
    slots = np.arange(num_tokens) % 3
    host = sort_rows(slots, RANKS)
    assert host.tile_size == tile_size
    assert host.tiles[:, 2].max() <= tile_size
    covered = [place for _, first, count, _ in host.tiles.tolist() for place in range(first, first + count)]
    assert covered == list(range(num_tokens))
    for slot, first, count, _ in host.tiles.tolist():
        assert set(slots[host.rows[first : first + count]]) == {slot}


def test_what_is_chosen(native_add_lora: AddLora, kernel_cache: Path) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert native_add_lora is not reference.add_lora
    assert build_add_lora(cpu, torch.float32, cache_dir=kernel_cache) is reference.add_lora
    assert build_add_lora(cpu, torch.bfloat16, "torch") is reference.add_lora
    assert build_add_lora(cuda, torch.bfloat16, "torch") is reference.add_lora


def test_the_kernels_in_the_interpreter(interpret: Callable[..., None]) -> None:
    interpret("test_gpu_lora.py")
