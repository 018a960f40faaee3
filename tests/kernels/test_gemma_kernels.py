"""What Gemma asks of kernels: capped scores, heads of 256, GELU, and norm weights in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.kernels.common.ops import Ops

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SOFTCAP = 0.8  # near the spread of the scores, so that it bends most of them


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 2e-2) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance)


def test_the_twin_caps_scores_before_the_softmax(twin: Ops, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([7], num_heads=2, num_kv_heads=1, head_size=8, block_size=4, dtype=torch.float32)
    keys, values = (part[batch.block_tables[0, :2].long()].flatten(0, 1)[:7, 0] for part in batch.kv_cache)
    scores = SOFTCAP * torch.tanh(batch.q[0] @ keys.T * batch.scale / SOFTCAP)
    expected = (scores.softmax(-1) @ values)[None], scores.logsumexp(-1)[None]
    arguments = (batch.seq_lens, batch.scale, None, SOFTCAP)
    assert_same(twin.paged_decode(batch.q, batch.kv_cache, batch.block_tables, *arguments), expected, 1e-5)
    arguments = (batch.query_starts, *arguments)
    assert_same(twin.paged_prefill(batch.q, batch.kv_cache, batch.block_tables, *arguments), expected, 1e-5)
    whole = batch.kv_cache.nan_to_num()
    assert not torch.equal(
        twin.prefix_attend(batch.q, whole, batch.block_tables[0, :1], batch.scale, SOFTCAP)[1],
        twin.prefix_attend(batch.q, whole, batch.block_tables[0, :1], batch.scale)[1],
    )


@pytest.mark.parametrize("softcap", [None, SOFTCAP, 50.0])
@pytest.mark.parametrize("window", [None, 19])
@pytest.mark.parametrize(("heads", "head_size"), [((4, 1), 256), ((9, 3), 64), ((2, 2), 20)])
def test_capped_attention(
    native: Ops,
    twin: Ops,
    paged_batch: Callable[..., Any],
    heads: tuple[int, int],
    head_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    shape = dict(num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size, block_size=8)
    batch = paged_batch([1, 70, 16, 333], keep=window, **shape)
    q, kv_cache = batch.wide()
    rest = (batch.block_tables, batch.seq_lens, batch.scale, window, softcap)
    assert_same(native.paged_decode(batch.q, batch.kv_cache, *rest), twin.paged_decode(q, kv_cache, *rest))
    batch = paged_batch([1, 33, 70, 150], [1, 33, 5, 40], keep=window, **shape)
    q, kv_cache = batch.wide()
    rest = (batch.block_tables, batch.query_starts, batch.seq_lens, batch.scale, window, softcap)
    assert_same(native.paged_prefill(batch.q, batch.kv_cache, *rest), twin.paged_prefill(q, kv_cache, *rest))
    batch = paged_batch([400], [5], **shape)
    q, kv_cache = batch.wide()
    rest = (batch.block_tables[0, :50], batch.scale, softcap)
    assert_same(native.prefix_attend(batch.q, batch.kv_cache, *rest), twin.prefix_attend(q, kv_cache, *rest))


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 50), (33, 2048)])
def test_gelu_mul(native: Ops, twin: Ops, rows: int, size: int) -> None:
    gate_up = randn(rows, 2 * size + 3)[:, : 2 * size] * 4
    torch.testing.assert_close(native.gelu_mul(gate_up), twin.gelu_mul(gate_up), atol=1e-5, rtol=1e-2)


def test_norms_with_a_weight_in_float32(native: Ops, twin: Ops) -> None:
    x, residual, weight = randn(5, 640), randn(5, 640, seed=1), 1 + randn(640, seed=2).float()
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-6), twin.rms_norm(x, weight, 1e-6))
    for ours, theirs in zip(
        native.add_rms_norm(x, residual, weight, 1e-6), twin.add_rms_norm(x, residual, weight, 1e-6), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(TypeError, match="bfloat16 or float32"):
        native.rms_norm(x, weight.half(), 1e-6)
