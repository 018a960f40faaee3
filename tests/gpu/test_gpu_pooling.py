"""Encoders and embedders on a card: attention without a KV cache in one launch, and whole engines beside the twin."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.attention import whole
from inferd.engine.attention.whole import WholeRows, attend_each, attend_whole
from inferd.engine.build import build_engine
from inferd.engine.config import EngineArgs
from inferd.engine.pooling.params import PoolingParams
from inferd.engine.testing.encoder_folder import make_encoder_folder
from inferd.engine.testing.pooling_jobs import pool_all
from inferd.engine.testing.random_checkpoint import make_random_checkpoint
from inferd.kernels.cuda.device import interpreted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(interpreted(), reason="these are no Triton kernels")]

LENS = (1, 17, 300, 64, 2, 513)
CLOSE = {"float32": 1.0 - 1e-6, "bfloat16": 0.99, "float16": 1.0 - 1e-4}  # cosine with the processor's float32


@pytest.mark.parametrize("head_size", [32, 64, 128])
def test_one_launch_equals_row_by_row(
    device: torch.device, dtype: torch.dtype, randn: Callable[..., Tensor], head_size: int
) -> None:
    fused = randn(sum(LENS), 3 * 4, head_size, dtype=dtype)
    q, k, v = fused.chunk(3, dim=1)
    rows = WholeRows.of(LENS, device)
    assert whole._varlen is not None, "this torch has no attention over ragged rows"
    found = attend_whole(q, k, v, rows, head_size**-0.5)
    exact = attend_each(*(x.float() for x in (q, k, v)), rows, head_size**-0.5)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), exact, atol=tolerance, rtol=tolerance)


def pooled(folder: Path, **options: Any) -> dict[str, Tensor]:
    source = random.Random(1)
    texts = {f"text-{n}": [source.randrange(5, 70) for _ in range(n)] for n in (1, 60, 7, 33, 20)}
    core, _ = build_engine(EngineArgs(str(folder), **options))
    try:
        found = pool_all(core, texts, PoolingParams(normalize=True))
    finally:
        core.shutdown()
    return {name: torch.tensor(vector) for name, vector in found.items()}


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_card_gives_the_processors_vectors(
    device: torch.device, dtype: torch.dtype, tmp_path: Path, kind: str
) -> None:
    sizes: dict[str, Any] = dict(hidden_size=128, num_attention_heads=4)
    if kind == "encoder":
        folder, options = make_encoder_folder(tmp_path / "model", **sizes), {}
    else:
        folder, options = make_random_checkpoint(tmp_path / "model", **sizes), {"runner": "pooling"}
    name = str(dtype).removeprefix("torch.")
    exact = pooled(folder, device="cpu", dtype="float32", kernels="torch", **options)
    found = pooled(folder, device="cuda", dtype=name, memory_fraction=0.05, kv_cache_bytes=1 << 26, **options)
    for text, vector in exact.items():
        assert float(vector @ found[text]) > CLOSE[name], text
