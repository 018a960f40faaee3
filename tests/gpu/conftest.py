"""The device that Triton kernels run on, and paged batches there whose unused memory is poison.

The kernel tests also run without a card, in Triton's interpreter (TRITON_INTERPRET=1, float32 only).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.kernels.common.ops import Ops
from inferd.kernels.cuda.device import interpreted
from inferd.kernels.cuda.ops import cuda_ops
from inferd.kernels.select import torch_ops


@pytest.fixture
def device() -> torch.device:
    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA card")
    return torch.device("cuda")


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if interpreted() and request.param != torch.float32:
        pytest.skip("the interpreter is for float32")
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture
def own(device: torch.device, dtype: torch.dtype) -> Ops:
    return cuda_ops(dtype, device, strict=True)


@pytest.fixture
def twin() -> Ops:
    return torch_ops("twins")


@pytest.fixture
def randn(device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return randn


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` of floats comes full of NaN: what is read before it is written shows."""
    real = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        tensor = real(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)


@dataclass(frozen=True)
class PagedBatch:
    """Rows of random tokens in randomly permuted blocks; everything else in the cache is NaN."""

    q: Tensor  # [t, hq, d], a strided view
    kv_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    scale: float

    def wide(self) -> tuple[Tensor, Tensor]:
        """(q, kv_cache) in float32."""
        return self.q.float(), self.kv_cache.float()


@pytest.fixture
def paged_batch(device: torch.device) -> Callable[..., PagedBatch]:
    def build(
        seq_lens: list[int],
        query_lens: list[int] | None = None,
        *,
        heads: tuple[int, int] = (9, 3),
        head_size: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        keep: int | None = None,
        shared_blocks: int = 0,
    ) -> PagedBatch:
        """`keep`: with a window, only a row's last tokens from (seq_len - query_len - keep) on are written.
        `shared_blocks`: the first blocks of every row that are those of row 0."""
        generator = torch.Generator().manual_seed(len(seq_lens))
        query_lens = query_lens or [1] * len(seq_lens)
        widths = [-(-length // block_size) for length in seq_lens]
        num_blocks = sum(widths) + 5
        order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        tables = torch.full((len(seq_lens), max([*widths, 1]) + 1), 2**30, dtype=torch.int32)  # far out of bounds
        kv_cache = torch.full((2, num_blocks, block_size, heads[1], head_size), torch.nan)
        for row, (length, width) in enumerate(zip(seq_lens, widths, strict=True)):
            tables[row, :width] = torch.tensor([order.pop() for _ in range(width)], dtype=torch.int32)
            if row:
                tables[row, :shared_blocks] = tables[0, :shared_blocks]
            first = 0 if keep is None else max(0, length - query_lens[row] - keep)
            positions = torch.arange(first, length)
            tokens = torch.randn(2, len(positions), heads[1], head_size, generator=generator)
            kv_cache[:, tables[row, positions // block_size].long(), positions % block_size] = tokens
        fused = torch.randn(sum(query_lens), heads[0] + 2, head_size, generator=generator).to(device, dtype)
        return PagedBatch(
            q=fused[:, : heads[0]],
            kv_cache=kv_cache.to(device, dtype),
            block_tables=tables.to(device),
            query_starts=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            scale=head_size**-0.5,
        )

    return build
