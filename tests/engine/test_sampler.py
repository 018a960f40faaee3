"""The sampler against a slow reference in float64, its edges, and what a row must not notice of its batch mates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inferd.engine.params import SamplingParams
from inferd.engine.sampling.batch import RandomRows, SamplingBatch, SamplingColumns
from inferd.engine.sampling.restricted import draw_by_rejection, draw_by_sorting
from inferd.engine.sampling.sampler import BROKEN, Sampler, greedy

CPU = torch.device("cpu")
ALMOST_ONE = math.nextafter(1.0, 0.0)


def batch_of(params: Sequence[SamplingParams], *, num_tokens: Sequence[int] | None = None) -> SamplingBatch:
    """Row i has seed i unless its parameters say otherwise."""
    columns = SamplingColumns(len(params))
    for row, row_params in enumerate(params):
        columns.set(row, row_params, row if row_params.seed is None else row_params.seed)
    count = len(params)
    known = np.array(num_tokens if num_tokens is not None else [10] * count)
    return columns.select(np.arange(count), [f"request-{row}" for row in range(count)], known, CPU)


def random_rows(batch: SamplingBatch) -> RandomRows:
    assert batch.random is not None
    return batch.random


def with_noise(u: Sequence[float], **limits: Any) -> RandomRows:
    """Rows that differ in their noise alone, which is the same at every draw."""
    rows = random_rows(batch_of([SamplingParams(**limits)] * len(u)))
    return replace(rows, u=torch.tensor(u, dtype=torch.float64)[:, None].expand(-1, rows.u.shape[1]))


def grid(count: int) -> list[float]:
    return [(index + 0.5) / count for index in range(count)]


def reference_kept(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Kept token id → probability, as the definitions say it."""
    peak = max(logits)
    probs = [math.exp((logit - peak) / params.temperature) for logit in logits]
    floor = params.min_p * max(probs)
    if params.top_k:
        floor = max(floor, sorted(probs, reverse=True)[: params.top_k][-1])
    kept = {token_id: p for token_id, p in enumerate(probs) if p >= floor}
    total = sum(kept.values())
    if params.top_p < 1.0:
        kept = {
            token_id: p
            for token_id, p in kept.items()
            if sum(other for other in kept.values() if other > p) < params.top_p * total
        }
    return {token_id: p / sum(kept.values()) for token_id, p in kept.items()}


def random_logits(num_rows: int, vocab_size: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


MIXES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_p": 0.97},
    {"temperature": 1.7, "min_p": 0.02, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"top_k": 200, "top_p": 0.999},
    {"top_k": 30, "min_p": 0.01, "temperature": 1.5},
]


@pytest.mark.parametrize("mix", MIXES)
def test_draws_only_what_is_kept(mix: dict[str, Any]) -> None:
    logits = random_logits(60, 331)
    params = [SamplingParams(**mix)] * len(logits)
    for row, token in enumerate(Sampler()(logits.clone(), batch_of(params)).tolist()):
        if params[0].greedy:
            assert token == int(logits[row].argmax())
        else:
            assert token in reference_kept(logits[row].tolist(), params[0])


@pytest.mark.parametrize("limits", [{}, {"top_k": 7}, {"min_p": 0.05}, {"temperature": 0.6, "top_k": 30, "min_p": 0.2}])
@pytest.mark.parametrize("vocab_size", [50, 300])
def test_inverse_cdf_over_a_grid_of_noise(limits: dict[str, Any], vocab_size: int) -> None:
    """With evenly spaced noise each count is within 1 of its expectation: no randomness is left in this test."""
    count = 4000
    logits = random_logits(1, vocab_size, spread=1.5)
    rows = with_noise(grid(count), **limits)
    probs = torch.softmax(logits / rows.temperature[0], -1).expand(count, -1)
    check_counts(draw_by_rejection(probs, rows), reference_kept(logits[0].tolist(), SamplingParams(**limits)), 1.01)


@pytest.mark.parametrize(
    "limits",
    [{"top_p": 0.8}, {"top_p": 0.3, "top_k": 9}, {"temperature": 0.6, "top_k": 30, "top_p": 0.9, "min_p": 0.01}],
)
@pytest.mark.parametrize("vocab_size", [50, 300])
def test_sorting_over_a_grid_of_noise(limits: dict[str, Any], vocab_size: int) -> None:
    count = 4000
    logits = random_logits(1, vocab_size, spread=1.5)
    rows = with_noise(grid(count), **limits)
    probs = torch.softmax(logits / rows.temperature[0], -1).expand(count, -1)
    check_counts(draw_by_sorting(probs, rows), reference_kept(logits[0].tolist(), SamplingParams(**limits)), 1.01)


def check_counts(ids: Tensor, kept: dict[int, float], tolerance: float) -> None:
    counts = torch.bincount(ids).tolist()
    assert {token_id for token_id, count in enumerate(counts) if count} <= set(kept)
    for token_id, probability in kept.items():
        count = counts[token_id] if token_id < len(counts) else 0
        assert abs(count - probability * len(ids)) <= tolerance, token_id


@pytest.mark.parametrize(
    "limits", [{}, {"top_p": 0.9}, {"top_p": 0.4}, {"top_p": 0.05, "temperature": 1.8}, {"top_k": 20, "top_p": 0.5}]
)
def test_chi_square_with_the_real_noise(limits: dict[str, Any]) -> None:
    """Top-p rejects up to nineteen draws in twenty here, and some rows run out of retries."""
    count, vocab_size = 20_000, 40
    logits = random_logits(1, vocab_size, spread=0.7)
    params = SamplingParams(seed=99, **limits)
    batch = batch_of([params] * count, num_tokens=range(count))
    counts = torch.bincount(Sampler()(logits.expand(count, -1).contiguous(), batch), minlength=vocab_size)
    kept = reference_kept(logits[0].tolist(), params)
    expected = torch.zeros(vocab_size, dtype=torch.float64)
    for token_id, probability in kept.items():
        expected[token_id] = probability * count
    assert not counts[expected == 0].any()
    some = expected > 0
    chi_square = float(((counts - expected)[some] ** 2 / expected[some]).sum())
    assert chi_square < len(kept) + 4.5 * math.sqrt(2 * len(kept))  # 4.5 standard deviations above the mean


def test_rows_out_of_retries_are_sorted() -> None:
    """The same noise at every draw walks down from the least likely token, far too slowly."""
    logits = torch.linspace(0.0, 0.4, 500).expand(3, -1)
    rows = with_noise([0.0, 0.001, 0.0], top_p=0.002)
    probs = torch.softmax(logits, -1)
    assert draw_by_rejection(probs, rows).tolist() == draw_by_sorting(probs, rows).tolist()
    assert draw_by_rejection(probs, rows)[0] == 499


@pytest.mark.parametrize("limits", [{}, {"top_k": 400}, {"top_p": 0.9999}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.9}])
@pytest.mark.parametrize("u", [0.0, ALMOST_ONE])
def test_extreme_noise_never_draws_the_impossible(limits: dict[str, Any], u: float) -> None:
    logits = random_logits(1, 500)
    logits[0, :7] = logits[0, 100:200] = logits[0, -9:] = -math.inf
    rows = with_noise([u], **limits)
    for draw in (draw_by_rejection, draw_by_sorting):
        token = int(draw(torch.softmax(logits, -1), rows))
        assert token in reference_kept(logits[0].tolist(), SamplingParams(**limits))
        assert logits[0, token] > -math.inf


def test_extreme_limits() -> None:
    logits = random_logits(6, 300)
    best = logits.argmax(dim=-1).tolist()
    for limits in (
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e-4},
        {"temperature": 2.0, "top_p": 1e-9},
    ):
        assert Sampler()(logits.clone(), batch_of([SamplingParams(**limits)] * 6)).tolist() == best, limits
    everything = Sampler()(logits.clone(), batch_of([SamplingParams(top_k=300)] * 6))
    for limits in ({"top_k": 10**9}, {}, {"top_p": 1.0, "min_p": 0.0}):
        assert Sampler()(logits.clone(), batch_of([SamplingParams(**limits)] * 6)).tolist() == everything.tolist()


@pytest.mark.parametrize("limits", [{"top_k": 16}, {"top_p": 0.1}, {"min_p": 0.99}])
def test_equal_logits_stay_together(limits: dict[str, Any]) -> None:
    count = 520
    logits = torch.full((1, 300), -9.0)
    logits[:, 40:] = 1.0
    assert greedy(logits).tolist() == [40]
    rows = with_noise(grid(count), **limits)
    drawn = draw_by_rejection(torch.softmax(logits, -1).expand(count, -1), rows)
    assert torch.bincount(drawn)[40:].tolist() == [2] * 260


def test_a_row_does_not_notice_its_mates() -> None:
    logits = random_logits(55, 1000, spread=2.0)
    params = [SamplingParams(**MIXES[row % len(MIXES)], seed=row) for row in range(len(logits))]
    together = Sampler()(logits.clone(), batch_of(params)).tolist()
    alone = [int(Sampler()(logits[row : row + 1].clone(), batch_of([params[row]]))) for row in range(len(params))]
    assert together == alone
    order = torch.randperm(len(params), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = Sampler()(logits[order].clone(), batch_of([params[row] for row in order])).tolist()
    assert shuffled == [alone[row] for row in order]


def test_noise_follows_seed_and_position() -> None:
    logits = torch.zeros(1, 4096)

    def token(seed: int, num_tokens: int) -> int:
        return int(Sampler()(logits.clone(), batch_of([SamplingParams(seed=seed)], num_tokens=[num_tokens])))

    assert token(5, 10) == token(5, 10)
    assert len({token(seed, 10) for seed in (5, 6, -5, 2**63 - 1, -(2**63))}) == 5
    assert len({token(5, num_tokens) for num_tokens in range(20)}) > 15


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mix", MIXES)
def test_a_broken_row_is_marked_and_its_mates_do_not_notice(bad: float, mix: dict[str, Any]) -> None:
    logits = random_logits(3, 500)
    batch = batch_of([SamplingParams(**mix)] * 3)
    expected = Sampler()(logits.clone(), batch).tolist()
    logits[1, 17] = bad
    assert Sampler()(logits, batch).tolist() == [expected[0], BROKEN, expected[2]]


@pytest.mark.parametrize("mix", MIXES)
def test_a_row_without_any_possible_token_is_broken(mix: dict[str, Any]) -> None:
    assert Sampler()(torch.full((1, 50), -math.inf), batch_of([SamplingParams(**mix)])).tolist() == [BROKEN]


def test_half_precision_logits() -> None:
    logits = random_logits(8, 300).bfloat16()
    params = [SamplingParams(**MIXES[row]) for row in range(8)]
    expected = Sampler()(logits.float(), batch_of(params)).tolist()
    assert Sampler()(logits, batch_of(params)).tolist() == expected
