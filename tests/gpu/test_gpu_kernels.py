"""Triton kernels against their twins in float32, on the same data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.kernels.common.ops import KernelUnavailable, Ops
from inferd.kernels.cuda.device import interpreted
from inferd.kernels.sampling.reference import BROKEN
from inferd.kernels.sampling.reference import greedy as reference_greedy

linear = pytest.importorskip("inferd.kernels.linear.triton", reason="Triton is not installed", exc_type=ImportError)

pytestmark = pytest.mark.gpu

SHAPES = [  # heads, head size, block size
    pytest.param((4, 4), 64, 16, id="group 1"),
    pytest.param((9, 3), 64, 128, id="group 3"),
    pytest.param((8, 2), 128, 128, id="group 4"),
    pytest.param((8, 2), 128, 16, id="group 4, small pages"),
    pytest.param((16, 2), 128, 64, id="group 8"),
    pytest.param((6, 2), 96, 128, id="size 96"),
    pytest.param((4, 2), 256, 128, id="size 256"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    tolerance = TOLERANCE[dtype] * factor
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def check_attention(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    assert actual[0].is_contiguous()
    assert actual[0].dtype == dtype
    assert_close(actual[0], expected[0], dtype)
    assert_close(actual[1], expected[1], dtype)


@pytest.mark.parametrize("size", [64, 100, 576, 4096])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_norms(own: Ops, twin: Ops, dtype: torch.dtype, randn: Callable[..., Tensor], rows: int, size: int) -> None:
    x, residual = randn(rows, size + 8, dtype=dtype)[:, :size], randn(rows, size, dtype=dtype)
    weight = randn(size, dtype=dtype)
    assert_close(own.rms_norm(x, weight, 1e-5), twin.rms_norm(x.float(), weight.float(), 1e-5), dtype)
    normed, total = own.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, twin.rms_norm((x + residual).float(), weight.float(), 1e-5), dtype)


def test_norm_of_heads_in_a_fused_projection(
    own: Ops, twin: Ops, dtype: torch.dtype, randn: Callable[..., Tensor]
) -> None:
    heads, weight = randn(5, 10, 24, dtype=dtype)[:, 2:9], randn(24, dtype=dtype)
    actual = own.rms_norm(heads, weight, 1e-6)
    assert actual.is_contiguous()
    assert_close(actual, twin.rms_norm(heads.float(), weight.float(), 1e-6), dtype)


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 50), (70, 3000)])
def test_silu_mul(own: Ops, twin: Ops, dtype: torch.dtype, randn: Callable[..., Tensor], rows: int, size: int) -> None:
    gate_up = randn(rows, 2 * size, dtype=dtype) * 4
    gate_up[0, 0], gate_up[0, 1] = 300.0, -300.0
    assert_close(own.silu_mul(gate_up), twin.silu_mul(gate_up.float()), dtype)


@pytest.mark.parametrize(("heads", "head_size"), [((9, 3), 64), ((4, 4), 20), ((32, 8), 128), ((2, 1), 256)])
def test_rope_store(
    own: Ops, twin: Ops, dtype: torch.dtype, randn: Callable[..., Tensor], heads: tuple[int, int], head_size: int
) -> None:
    num_heads, num_kv_heads = heads
    rows = 21
    fused = randn(rows, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
    positions = torch.randperm(100)[:rows].to(fused.device)
    angles = torch.rand(100, head_size // 2, device=fused.device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = torch.randperm(8 * 16)[:rows].to(fused.device)
    slots[3] = -1
    results = []
    for ops, data in ((own, fused.clone()), (twin, fused.float())):
        q, k, v = data.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        kv_cache = torch.full((2, 8, 16, num_kv_heads, head_size), 7.0, dtype=data.dtype, device=data.device)
        ops.rope_store(q, k, v, positions, cos_sin, kv_cache, slots)
        results.append((data, kv_cache))
    (actual, actual_cache), (expected, expected_cache) = results
    assert_close(actual, expected, dtype)
    assert_close(actual_cache, expected_cache, dtype)


@pytest.mark.parametrize("shape", [(48, 264), (1000, 512), (4096, 4096), (4000, 4096), (960, 1000)])
def test_few_row_linear(dtype: torch.dtype, randn: Callable[..., Tensor], shape: tuple[int, int]) -> None:
    out_features, in_features = shape
    if interpreted() and out_features > 1000:
        pytest.skip("too large for the interpreter")
    if dtype == torch.float32 and not interpreted():
        pytest.skip("float32 goes through cuBLAS")
    weight = randn(out_features, in_features, dtype=dtype) * in_features**-0.5
    bias = randn(out_features, dtype=dtype)
    for some_bias in (bias, None):
        own = linear.make_linear(weight, some_bias)
        for rows in (1, 2, 5, 16, 17, 1, 16):  # again: what the calls share is as they found it
            x = randn(rows, in_features + 8, dtype=dtype)[:, :in_features]
            wide = None if some_bias is None else some_bias.float()
            assert_close(own(x), torch.nn.functional.linear(x.float(), weight.float(), wide), dtype)


@pytest.mark.parametrize("splits", [1, 3])
def test_few_row_linear_in_parts(dtype: torch.dtype, randn: Callable[..., Tensor], splits: int) -> None:
    if dtype == torch.float32 and not interpreted():
        pytest.skip("float32 goes through cuBLAS")
    weight, x = randn(200, 1000, dtype=dtype) * 0.03, randn(9, 1000, dtype=dtype)
    plan = linear.Tile(outputs=64, step=64, splits=splits, num_warps=4, num_stages=3)
    arrivals = torch.zeros(4, dtype=torch.int32, device=x.device)
    for _ in range(2):
        own = linear.tile_linear(x, weight, None, arrivals, plan)
        assert_close(own, torch.nn.functional.linear(x.float(), weight.float()), dtype)
    assert not arrivals.any()


@pytest.mark.parametrize("window", [None, 1, 19])
@pytest.mark.parametrize(("heads", "head_size", "block_size"), SHAPES)
def test_paged_decode(
    own: Ops,
    twin: Ops,
    dtype: torch.dtype,
    paged_batch: Callable[..., Any],
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    window: int | None,
) -> None:
    batch = paged_batch(
        [1, 70, 16, 0, 333], heads=heads, head_size=head_size, block_size=block_size, dtype=dtype, keep=window
    )
    arguments = (batch.block_tables, batch.seq_lens, batch.scale, window)
    q, kv_cache = batch.wide()
    check_attention(
        own.paged_decode(batch.q, batch.kv_cache, *arguments), twin.paged_decode(q, kv_cache, *arguments), dtype
    )


@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_few_long_rows_are_divided(
    own: Ops, twin: Ops, dtype: torch.dtype, paged_batch: Callable[..., Any], rows: int, window: int | None
) -> None:
    batch = paged_batch([2000 - 13 * row for row in range(rows)], block_size=128, dtype=dtype, keep=window)
    arguments = (batch.block_tables, batch.seq_lens, batch.scale, window)
    q, kv_cache = batch.wide()
    check_attention(
        own.paged_decode(batch.q, batch.kv_cache, *arguments), twin.paged_decode(q, kv_cache, *arguments), dtype
    )


@pytest.mark.parametrize("window", [None, 1, 19, 200])
@pytest.mark.parametrize(("heads", "head_size", "block_size"), SHAPES)
def test_paged_prefill(
    own: Ops,
    twin: Ops,
    dtype: torch.dtype,
    paged_batch: Callable[..., Any],
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    window: int | None,
) -> None:
    batch = paged_batch(
        [1, 33, 70, 450, 9, 300],
        [1, 33, 5, 40, 0, 300],
        heads=heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        keep=window,
    )
    arguments = (batch.block_tables, batch.query_starts, batch.seq_lens, batch.scale, window)
    q, kv_cache = batch.wide()
    check_attention(
        own.paged_prefill(batch.q, batch.kv_cache, *arguments), twin.paged_prefill(q, kv_cache, *arguments), dtype
    )


def test_a_short_chunk_of_a_long_prompt_is_divided(
    own: Ops, twin: Ops, dtype: torch.dtype, paged_batch: Callable[..., Any]
) -> None:
    batch = paged_batch([3000], [6], block_size=128, dtype=dtype)
    arguments = (batch.block_tables, batch.query_starts, batch.seq_lens, batch.scale, None)
    q, kv_cache = batch.wide()
    check_attention(
        own.paged_prefill(batch.q, batch.kv_cache, *arguments), twin.paged_prefill(q, kv_cache, *arguments), dtype
    )


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (16, 2)])
@pytest.mark.parametrize(("rows", "block_size"), [(1, 16), (5, 128), (40, 128)])
def test_prefix_attend(
    own: Ops,
    twin: Ops,
    dtype: torch.dtype,
    paged_batch: Callable[..., Any],
    heads: tuple[int, int],
    rows: int,
    block_size: int,
) -> None:
    tokens = 1280 if block_size == 128 else 400
    batch = paged_batch([tokens], [rows], heads=heads, block_size=block_size, dtype=dtype)
    blocks = batch.block_tables[0, : tokens // block_size]
    q, kv_cache = batch.wide()
    check_attention(
        own.prefix_attend(batch.q, batch.kv_cache, blocks, batch.scale),
        twin.prefix_attend(q, kv_cache, blocks, batch.scale),
        dtype,
    )


def test_merge_lse(own: Ops, twin: Ops, dtype: torch.dtype, randn: Callable[..., Tensor]) -> None:
    out_a, out_b = randn(6, 3, 20, dtype=dtype), randn(6, 3, 20, dtype=dtype)
    lse_a, lse_b = randn(6, 3) * 5, randn(6, 3) * 5
    lse_a[0], lse_b[1] = -torch.inf, -torch.inf
    lse_a[2] = lse_b[2] = -torch.inf
    expected = twin.merge_lse(out_a.float(), lse_a, out_b.float(), lse_b)
    assert_close(own.merge_lse(out_a, lse_a, out_b, lse_b), expected, dtype)


@pytest.mark.parametrize("size", [5, 4096, 128256])
def test_greedy(device: torch.device, randn: Callable[..., Tensor], size: int) -> None:
    from inferd.kernels.sampling.triton import greedy

    logits = randn(12, size + 3)[:, :size].round(decimals=1)  # with equal ones
    logits[1] = -torch.inf
    logits[2, 4] = torch.inf
    logits[3, size // 2] = torch.nan
    logits[4, 1] = -torch.inf
    logits[5] = 0.0
    logits[5, ::2] = -0.0
    logits[6] = -1.0 - logits[6].abs()
    assert torch.equal(greedy(logits), reference_greedy(logits))
    assert greedy(logits)[1:4].tolist() == [BROKEN] * 3
    assert greedy(logits[:0]).shape == (0,)


@pytest.mark.skipif(interpreted(), reason="cuBLAS needs a card")
def test_logits_keep_their_sums(own: Ops, dtype: torch.dtype, randn: Callable[..., Tensor]) -> None:
    weight, x = randn(1000, 512, dtype=dtype), randn(3, 512, dtype=dtype)
    logits = own.make_logits(weight)(x)
    assert logits.dtype == torch.float32
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), exact, atol=1e-3, rtol=1e-5)


def test_empty_batches(own: Ops, dtype: torch.dtype, device: torch.device) -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    assert own.rms_norm(zeros(0, 64), zeros(64), 1e-5).shape == (0, 64)
    assert own.silu_mul(zeros(0, 64)).shape == (0, 32)
    assert own.make_linear(zeros(16, 64), None)(zeros(0, 64)).shape == (0, 16)


def test_a_weight_that_own_kernels_cannot_serve(own: Ops, dtype: torch.dtype, randn: Callable[..., Tensor]) -> None:
    if dtype == torch.float32:
        pytest.skip("float32 goes through cuBLAS")
    with pytest.raises(KernelUnavailable, match=r"\(16, 33\)"):
        own.make_linear(randn(16, 33, dtype=dtype), None)
