"""A grammar's bitmask on logits: whatever the path, what it forbids and nothing else goes out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferd.kernels.grammar.bitmask import apply_bitmask, apply_bitmask_reference


def packed(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), np.bool_)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [32, 97, 5000])
@pytest.mark.parametrize("shares", [[0.0], [1.0], [0.002], [0.999], [0.5], [0.001, 0.99, 0.0, 1.0, 0.3]])
def test_both_paths_agree(shares: list[float], vocab_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    allowed = np.stack([rng.random(vocab_size) < share for share in shares])
    logits = torch.randn(len(shares) + 2, vocab_size).to(dtype)
    rows = torch.from_numpy(rng.permutation(len(shares) + 2)[: len(shares)])
    expected = logits.clone()
    for row, flags in zip(rows.tolist(), allowed, strict=True):
        expected[row, torch.from_numpy(~flags)] = float("-inf")
    ours, twin = logits.clone(), logits.clone()
    apply_bitmask(ours, rows, packed(allowed))
    apply_bitmask_reference(twin, rows, torch.from_numpy(packed(allowed)))
    assert torch.equal(ours, expected)
    assert torch.equal(twin, expected)


def test_a_message_from_another_process_is_read_only() -> None:
    mask = np.frombuffer(packed(np.ones((1, 64), np.bool_)).tobytes(), np.int32).reshape(1, 2)
    logits = torch.zeros(1, 64)
    apply_bitmask(logits, torch.tensor([0]), mask)
    assert not logits.any()
