"""Kernels to test, and paged batches whose unused memory is poison."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.kernels.common.ops import KernelUnavailable, Ops
from inferd.kernels.select import build_ops

CPU = torch.device("cpu")
GPU_TESTS = Path(__file__).parents[1] / "gpu"

# NumPy no longer turns arrays of one element into numbers, on which Triton 3.6's interpreter relies for loop bounds.
RUN = """
import sys
import pytest
from triton.runtime import interpreter
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
interpreter._patch_lang_tensor = patched
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def _interpret(name: str, *options: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-P", "-c", RUN, "-m", "gpu", *options, "-x", "-W", "ignore::RuntimeWarning"]
    done = subprocess.run([*command, str(GPU_TESTS / name)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture
def interpret() -> Callable[..., None]:
    """Runs a file of tests for the card in Triton's interpreter; options are pytest's."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return _interpret


@pytest.fixture
def native(kernel_cache: Path) -> Ops:
    try:
        return build_ops(CPU, torch.bfloat16, "native", cache_dir=kernel_cache)
    except KernelUnavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture
def twin() -> Ops:
    return build_ops(CPU, torch.float32, "torch")


@pytest.fixture
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


def _paged_batch(
    seq_lens: list[int],
    query_lens: list[int] | None = None,
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    keep: int | None = None,
    seed: int = 0,
) -> PagedBatch:
    """`keep`: with a window, only each row's last tokens from (seq_len - query_len - keep) on are written."""
    generator = torch.Generator().manual_seed(seed)
    query_lens = query_lens or [1] * len(seq_lens)
    widths = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(widths) + 5
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(seq_lens), max([*widths, 1]) + 1, dtype=torch.int32)
    kv_cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_size), torch.nan, dtype=dtype)
    for row, (length, width) in enumerate(zip(seq_lens, widths, strict=True)):
        blocks = [order.pop() for _ in range(width)]
        tables[row, :width] = torch.tensor(blocks, dtype=torch.int32)
        first = 0 if keep is None else max(0, length - query_lens[row] - keep)
        for position in range(first, length):
            token = torch.randn(2, num_kv_heads, head_size, generator=generator)
            kv_cache[:, blocks[position // block_size], position % block_size] = token.to(dtype)
    fused = torch.randn(sum(query_lens), num_heads + 2, head_size, generator=generator).to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return PagedBatch(
        q=fused[:, :num_heads],
        kv_cache=kv_cache,
        block_tables=tables,
        query_starts=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        scale=head_size**-0.5,
    )


@pytest.fixture
def paged_batch() -> Callable[..., PagedBatch]:
    return _paged_batch
