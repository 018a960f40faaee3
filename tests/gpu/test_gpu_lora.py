"""The Triton kernels of adapters against their twin in float32, on the same data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from inferd.kernels.lora import reference
from inferd.kernels.lora.rows import NO_SLOT, HostRows, LoraRows, sort_rows

lora = pytest.importorskip("inferd.kernels.lora.triton", reason="Triton is not installed", exc_type=ImportError)

pytestmark = pytest.mark.gpu

RANKS = (4, 16, 9, 0)  # by slot; the last is empty
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def on(device: torch.device, host: HostRows) -> LoraRows:
    rows, tiles = torch.from_numpy(host.rows).to(device), torch.from_numpy(host.tiles).to(device)
    return LoraRows(rows, host.segments, tiles, host.tile_size)


def factors(
    randn: Callable[..., Tensor], in_features: int, sizes: Sequence[int], dtype: torch.dtype, max_rank: int = 16
) -> tuple[Tensor, Tensor]:
    a = randn(len(RANKS), max_rank, len(sizes), in_features) * in_features**-0.5
    b = randn(len(RANKS), max_rank, sum(sizes)) * 0.3
    for slot, rank in enumerate(RANKS):  # what lies beyond is not read
        a[slot, rank:] = torch.nan
        b[slot, rank:] = torch.nan
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("sizes", [(48,), (70, 70), (64, 32, 16)], ids=["one", "gate and up", "q, k and v"])
@pytest.mark.parametrize("in_features", [40, 320])
@pytest.mark.parametrize("slots", [[0], [1, NO_SLOT, 0, 2, 1, NO_SLOT], [2] * 40 + [NO_SLOT] * 3 + [0] * 20])
def test_adapters_mixed_in_a_batch(
    device: torch.device,
    dtype: torch.dtype,
    randn: Callable[..., Tensor],
    in_features: int,
    sizes: tuple[int, ...],
    slots: list[int],
) -> None:
    a, b = factors(randn, in_features, sizes, dtype)
    x = randn(len(slots), in_features + 8, dtype=dtype)[:, :in_features]
    y = randn(len(slots), sum(sizes), dtype=dtype)
    rows = on(device, sort_rows(np.array(slots), RANKS))
    expected, wide = y.float(), (a.float(), b.float())
    reference.add_lora(expected, x.float(), *wide, sizes, rows)
    before = y.clone()
    lora.add_lora(y, x, a, b, sizes, rows)
    torch.testing.assert_close(y.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    without = [token for token, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.equal(y[without], before[without])


@pytest.mark.parametrize("max_rank", [20, 64])
def test_other_ranks_than_powers_of_two_and_large_tiles(
    device: torch.device, dtype: torch.dtype, randn: Callable[..., Tensor], max_rank: int
) -> None:
    slots = np.arange(600) % 4 - 1
    a, b = factors(randn, 136, (50,), dtype, max_rank)
    x, y = randn(600, 136, dtype=dtype), randn(600, 50, dtype=dtype)
    rows = on(device, sort_rows(slots, RANKS))
    expected = y.float()
    reference.add_lora(expected, x.float(), a.float(), b.float(), (50,), rows)
    lora.add_lora(y, x, a, b, (50,), rows)
    torch.testing.assert_close(y.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_padding_changes_nothing(device: torch.device, dtype: torch.dtype, randn: Callable[..., Tensor]) -> None:
    """A captured step has tiles and rows that no token stands behind."""
    a, b = factors(randn, 64, (32,), dtype)
    x, y = randn(4, 64, dtype=dtype), randn(4, 32, dtype=dtype)
    tiles = torch.tensor([[NO_SLOT] * 4, [1, 0, 1, 16], [NO_SLOT] * 4], dtype=torch.int32, device=device)
    rows = torch.tensor([2, 0, 0, 0], device=device)
    expected = y.clone()
    lora.add_lora(expected, x, a, b, (32,), on(device, sort_rows(np.array([NO_SLOT, NO_SLOT, 1, NO_SLOT]), RANKS)))
    lora.add_lora(y, x, a, b, (32,), LoraRows(rows, (), tiles, 16))
    assert torch.equal(y, expected)
