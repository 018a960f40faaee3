"""Who gets Triton kernels, and what the others are told. Needs neither Triton nor a card."""

from __future__ import annotations

import pytest
import torch

from inferd.engine.attention.select import choose
from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.errors import ConfigError
from inferd.kernels.common.ops import KernelUnavailable
from inferd.kernels.linear import reference
from inferd.kernels.select import build_ops, torch_ops

without_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")


@without_card
def test_kernels_that_must_be_native_name_what_is_missing() -> None:
    with pytest.raises(KernelUnavailable, match=r"kernels='native' cannot be served: .*(Triton|no CUDA card)"):
        build_ops(torch.device("cuda"), torch.bfloat16, "native")


@without_card
def test_kernels_that_are_missing_fall_back_aloud() -> None:
    ops = build_ops(torch.device("cuda"), torch.bfloat16, "auto")
    assert ops.make_linear is reference.make_linear
    assert "plain torch, because own kernels cannot be used" in ops.describe()


def test_the_triton_backend_refuses_the_processor() -> None:
    spec = KVSpec(block_size=128, num_kv_heads=2, head_size=64, dtype="bfloat16")
    with pytest.raises(ConfigError, match="TRITON_ATTN: it runs on CUDA cards, not on cpu"):
        choose("TRITON_ATTN", torch_ops("test"), [spec], torch.device("cpu"))
