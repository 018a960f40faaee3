"""Attention of whole rows without a KV cache, and who serves it."""

from __future__ import annotations

import pytest
import torch

from inferd.engine.attention.select import choose
from inferd.engine.attention.torch import TorchBackend
from inferd.engine.attention.triton import TritonBackend
from inferd.engine.core.kv.spec import EncoderOnlySpec
from inferd.engine.errors import ConfigError
from inferd.kernels.select import torch_ops

CPU = torch.device("cpu")
SPEC = EncoderOnlySpec(16, num_kv_heads=3, head_size=8, dtype="float32")


@pytest.mark.parametrize("lens", [[5], [1, 1, 1], [3, 1, 17, 2], [64, 65]])
def test_each_row_sees_itself_and_nothing_else(lens: list[int]) -> None:
    backend, scale = TorchBackend(torch_ops("twins")), 0.3
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(sum(lens), 9, 8, generator=generator)
    q, k, v = fused.chunk(3, dim=1)  # strided views of one projection
    found = backend.attend_whole(q, k, v, backend.build_whole(lens, CPU), scale)
    assert found.is_contiguous()
    row = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(row[:, None] != row[None, :], -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_backend_that_cannot_serve_it_says_so_and_the_next_is_taken() -> None:
    assert isinstance(choose("auto", torch_ops("test"), [SPEC], CPU), TorchBackend)
    with pytest.raises(ConfigError, match="TRITON_ATTN: it has no kernels for attention without a KV cache"):
        choose("TRITON_ATTN", torch_ops("test"), [SPEC], CPU)
    with pytest.raises(NotImplementedError, match="TRITON_ATTN serves no attention without a KV cache"):
        TritonBackend(torch_ops("test")).build_whole([1], CPU)
