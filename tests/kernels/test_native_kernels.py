"""Own C kernels against their twins in float32, on the same bfloat16 data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.kernels.common.ops import KernelUnavailable, Ops

pytestmark = pytest.mark.usefixtures("poisoned_empty")

HEADS = [(4, 4), (9, 3), (8, 2), (16, 2), (7, 1)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [16, 20, 64, 576, 1001])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_norms(native: Ops, twin: Ops, rows: int, size: int) -> None:
    x, residual, weight = randn(rows, size + 8)[:, :size], randn(rows, size, seed=1), randn(size, seed=2)
    assert_close(native.rms_norm(x, weight, 1e-5), twin.rms_norm(x.float(), weight.float(), 1e-5))
    normed, total = native.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, twin.rms_norm((x + residual).float(), weight.float(), 1e-5))


def test_norm_of_heads_in_a_fused_projection(native: Ops, twin: Ops) -> None:
    heads = randn(5, 10, 24)[:, 2:9]
    weight = randn(24, seed=1)
    actual = native.rms_norm(heads, weight, 1e-6)
    assert actual.is_contiguous()
    assert_close(actual, twin.rms_norm(heads.float(), weight.float(), 1e-6))


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 50), (33, 1536)])
def test_silu_mul(native: Ops, twin: Ops, rows: int, size: int) -> None:
    gate_up = randn(rows, 2 * size) * 4
    gate_up[0, 0], gate_up[0, 1] = 300.0, -300.0
    assert_close(native.silu_mul(gate_up), twin.silu_mul(gate_up.float()))


@pytest.mark.parametrize(("heads", "head_size"), [((9, 3), 64), ((4, 4), 20), ((2, 1), 128)])
def test_rope_store(native: Ops, twin: Ops, heads: tuple[int, int], head_size: int) -> None:
    num_heads, num_kv_heads = heads
    rows = 21
    fused = randn(rows, num_heads + 2 * num_kv_heads, head_size)
    positions = torch.randperm(100)[:rows]
    angles = torch.rand(100, head_size // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = torch.randperm(8 * 4)[:rows]
    slots[3] = -1
    results = []
    for ops, data in ((native, fused.clone()), (twin, fused.float())):
        q, k, v = data.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        kv_cache = torch.full((2, 8, 4, num_kv_heads, head_size), 7.0, dtype=data.dtype)
        ops.rope_store(q, k, v, positions, cos_sin, kv_cache, slots)
        results.append((data, kv_cache))
    (actual, actual_cache), (expected, expected_cache) = results
    assert_close(actual, expected)
    assert_close(actual_cache, expected_cache)


@pytest.mark.parametrize("shape", [(8, 34), (50, 20), (333, 64), (960, 576), (40, 3000)])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 16, 22, 23, 33, 49, 70, 200])
def test_linear(native: Ops, twin: Ops, rows: int, shape: tuple[int, int]) -> None:
    out_features, in_features = shape
    x = randn(rows, in_features + 8)[:, :in_features]
    weight, bias = randn(out_features, in_features, seed=1) * in_features**-0.5, randn(out_features, seed=2)
    for some_bias in (bias, None):
        wide_bias = None if some_bias is None else some_bias.float()
        expected = twin.make_linear(weight.float(), wide_bias)(x.float())
        assert_close(native.make_linear(weight, some_bias)(x), expected)


@pytest.mark.parametrize("rows", [1, 5, 22, 23, 49])
def test_logits_keep_their_float32_sums(native: Ops, twin: Ops, rows: int) -> None:
    x, weight = randn(rows, 576), randn(333, 576, seed=1)
    logits = native.make_logits(weight)(x)
    assert logits.dtype == twin.make_logits(weight)(x).dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 19])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_size", [16, 20, 64, 80, 128])
def test_paged_decode(
    native: Ops, twin: Ops, paged_batch: Callable[..., Any], heads: tuple[int, int], head_size: int, window: int | None
) -> None:
    batch = paged_batch(
        [1, 70, 16, 0, 333], num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size, block_size=4, keep=window
    )
    arguments = (batch.block_tables, batch.seq_lens, batch.scale, window)
    q, kv_cache = batch.wide()
    for actual, expected in zip(
        native.paged_decode(batch.q, batch.kv_cache, *arguments),
        twin.paged_decode(q, kv_cache, *arguments),
        strict=True,
    ):
        assert_close(actual, expected)


@pytest.mark.parametrize("window", [None, 1, 19])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_size", [16, 20, 64, 80, 128])
def test_paged_prefill(
    native: Ops, twin: Ops, paged_batch: Callable[..., Any], heads: tuple[int, int], head_size: int, window: int | None
) -> None:
    batch = paged_batch(
        [1, 33, 70, 150, 9],
        [1, 33, 5, 40, 0],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        block_size=8,
        keep=window,
    )
    arguments = (batch.block_tables, batch.query_starts, batch.seq_lens, batch.scale, window)
    q, kv_cache = batch.wide()
    for actual, expected in zip(
        native.paged_prefill(batch.q, batch.kv_cache, *arguments),
        twin.paged_prefill(q, kv_cache, *arguments),
        strict=True,
    ):
        assert_close(actual, expected)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_size", [20, 64, 80, 128])
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_prefix_attend(
    native: Ops, twin: Ops, paged_batch: Callable[..., Any], heads: tuple[int, int], head_size: int, rows: int
) -> None:
    batch = paged_batch([400], [rows], num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size)
    blocks = batch.block_tables[0, :25]
    q, kv_cache = batch.wide()
    for actual, expected in zip(
        native.prefix_attend(batch.q, batch.kv_cache, blocks, batch.scale),
        twin.prefix_attend(q, kv_cache, blocks, batch.scale),
        strict=True,
    ):
        assert_close(actual, expected)


def test_merge_lse(native: Ops, twin: Ops) -> None:
    out_a, out_b = randn(6, 3, 20), randn(6, 3, 20, seed=1)
    lse_a, lse_b = torch.randn(6, 3) * 5, torch.randn(6, 3) * 5
    lse_a[0], lse_b[1] = -torch.inf, -torch.inf
    lse_a[2] = lse_b[2] = -torch.inf
    expected = twin.merge_lse(out_a.float(), lse_a, out_b.float(), lse_b)
    assert_close(native.merge_lse(out_a, lse_a, out_b, lse_b), expected)


def test_indices_outside_of_their_tables_are_errors(native: Ops, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([20, 30])
    tables = batch.block_tables.clone()
    tables[1, 0] = 10_000
    with pytest.raises(IndexError, match="paged_decode"):
        native.paged_decode(batch.q, batch.kv_cache, tables, batch.seq_lens, 1.0, None)
    with pytest.raises(IndexError, match="paged_decode"):
        native.paged_decode(batch.q, batch.kv_cache, batch.block_tables, batch.seq_lens + 500, 1.0, None)
    with pytest.raises(IndexError, match="paged_prefill"):
        native.paged_prefill(batch.q, batch.kv_cache, tables, batch.query_starts, batch.seq_lens, 1.0, None)
    q, k = randn(1, 2, 64), randn(1, 3, 64)
    far, cos_sin = torch.tensor([50]), torch.zeros(50, 64)
    with pytest.raises(IndexError, match="rope_store"):
        native.rope_store(q, k, k, far, cos_sin, batch.kv_cache, torch.tensor([0]))
    with pytest.raises(IndexError, match="rope_store"):
        native.rope_store(q, k, k, torch.tensor([0]), cos_sin, batch.kv_cache, torch.tensor([10**6]))


def test_wrong_dtypes_and_layouts_are_errors(native: Ops, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([20])
    with pytest.raises(TypeError, match="rms_norm"):
        native.rms_norm(torch.zeros(2, 8), torch.zeros(8), 1e-5)
    with pytest.raises(TypeError, match="linear"):
        native.make_linear(randn(16, 16), None)(torch.zeros(1, 16))
    with pytest.raises(TypeError, match="linear"):
        native.make_linear(randn(16, 16), None)(randn(16, 4).t())
    with pytest.raises(TypeError, match="block ids"):
        native.paged_decode(batch.q, batch.kv_cache, batch.block_tables.long(), batch.seq_lens, 1.0, None)
    with pytest.raises(TypeError, match="KV cache"):
        native.paged_decode(batch.q, batch.kv_cache.float(), batch.block_tables, batch.seq_lens, 1.0, None)


def test_a_weight_that_own_kernels_cannot_serve(native: Ops) -> None:
    with pytest.raises(KernelUnavailable, match="16x33"):
        native.make_linear(randn(16, 33), None)


def test_the_process_has_one_openmp_runtime(native: Ops, kernel_cache: Path) -> None:
    """A second one would fight the first for the cores. A process of its own, which loads what an engine does."""
    script = f"""
import re
from pathlib import Path
import torch
from inferd.engine.executor.uniproc import UniProcExecutor
from inferd.kernels.select import build_ops
ops = build_ops(torch.device("cpu"), torch.bfloat16, "native", cache_dir=Path({str(kernel_cache)!r}))
x = torch.ones(64, 1024, dtype=torch.bfloat16)
ops.rms_norm(x, x[0], 1e-5) @ x.T
paths = {{line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}}
loaded = [path for path in paths if re.search(r"/lib(gomp|iomp5|omp)[^/]*[.]so", path)]
print(any("/cpu-" in path for path in paths), len(loaded), *loaded)
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[:2] == ["True", "1"], done.stdout
