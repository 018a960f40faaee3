"""The sampler against a slow reference in float64, its edges, and what a row must not notice of its batch mates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inferd.engine.params import SamplingParams
from inferd.engine.sampling.batch import ALL_TOKENS, RandomRows, SamplingBatch, SamplingColumns
from inferd.engine.sampling.sampler import BROKEN, Sampler

CPU = torch.device("cpu")
ALMOST_ONE = math.nextafter(1.0, 0.0)
EOS = 3


def batch_of(
    params: Sequence[SamplingParams], *, num_tokens: Sequence[int] | None = None, num_output: int = 0
) -> SamplingBatch:
    """Row i has seed i unless its parameters say otherwise."""
    columns = SamplingColumns(len(params), [EOS])
    for row, row_params in enumerate(params):
        columns.set(row, row_params, row if row_params.seed is None else row_params.seed)
    count = len(params)
    known = np.array(num_tokens if num_tokens is not None else [10] * count)
    ids = [f"request-{row}" for row in range(count)]
    return columns.select(np.arange(count), ids, known, np.full(count, num_output), CPU)


def fixed_noise(u: Sequence[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingBatch:
    """Rows that differ in their noise alone."""
    count = len(u)
    rows = RandomRows(
        rows=list(range(count)),
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k or ALL_TOKENS),
        top_p=torch.full((count,), top_p, dtype=torch.float64),
        u=torch.tensor(u, dtype=torch.float64),
    )
    plain = not top_k and top_p == 1.0
    ids = [str(row) for row in range(count)]
    return SamplingBatch(ids, [], rows if plain else None, None if plain else rows)


def grid(count: int) -> list[float]:
    return [(index + 0.5) / count for index in range(count)]


def reference_kept(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[tuple[int, float]]:
    """Kept (token id, probability), in the order of the inverse CDF, as the definitions say it."""
    peak = max(logits)
    weights = [math.exp((logit - peak) / temperature) for logit in logits]
    order = list(range(len(logits)))
    if top_k or top_p < 1.0:
        order.sort(key=lambda token_id: (-logits[token_id], token_id))
    order = order[: top_k or None]
    total, kept, mass = sum(weights[token_id] for token_id in order), [], 0.0
    for token_id in order:
        if top_p < 1.0 and mass >= top_p * total:
            break
        kept.append(token_id)
        mass += weights[token_id]
    return [(token_id, weights[token_id] / mass) for token_id in kept]


def random_logits(num_rows: int, vocab_size: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


MIXES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.5},
    {"temperature": 1.7, "top_p": 0.97},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"top_k": 200, "top_p": 0.999},
]


@pytest.mark.parametrize("widths", [(), (4, 16), (256, 4096)])
@pytest.mark.parametrize("mix", MIXES)
def test_agrees_with_the_definition(mix: dict[str, Any], widths: tuple[int, ...]) -> None:
    logits = random_logits(40, 331)
    params = [SamplingParams(**mix)] * len(logits)
    batch = batch_of(params)
    tokens = Sampler(widths)(logits.clone(), batch).tolist()
    if params[0].greedy:
        assert tokens == logits.argmax(dim=-1).tolist()
        return
    random = batch.plain or batch.restricted
    assert random is not None
    for row, (token, u) in enumerate(zip(tokens, random.u.tolist(), strict=True)):
        kept = reference_kept(logits[row].tolist(), params[0].temperature, params[0].top_k, params[0].top_p)
        below = 0.0
        for token_id, probability in kept:
            if token_id == token:
                assert below - 1e-5 <= u <= below + probability + 1e-5
                break
            below += probability
        else:
            pytest.fail(f"row {row} drew {token}, which is not kept")


@pytest.mark.parametrize("limits", [{}, {"top_k": 7}, {"top_p": 0.8}, {"temperature": 0.6, "top_k": 30, "top_p": 0.9}])
@pytest.mark.parametrize("vocab_size", [50, 300])
def test_distribution_over_a_grid_of_noise(limits: dict[str, Any], vocab_size: int) -> None:
    """With evenly spaced noise each count is within 1 of its expectation: no randomness is left in this test."""
    count = 4000
    logits = random_logits(1, vocab_size, spread=1.5)
    tokens = Sampler((8, 64))(logits.expand(count, -1).contiguous(), fixed_noise(grid(count), **limits))
    counts = torch.bincount(tokens, minlength=vocab_size)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | limits
    expected = torch.zeros(vocab_size, dtype=torch.float64)
    for token_id, probability in reference_kept(logits[0].tolist(), **options):
        expected[token_id] = probability * count
    assert (counts - expected).abs().max() <= 1.01
    assert not counts[expected == 0].any()


def test_chi_square_with_the_real_noise() -> None:
    count, vocab_size = 8000, 40
    logits = random_logits(1, vocab_size, spread=1.0)
    batch = batch_of([SamplingParams(seed=99)] * count, num_tokens=range(count))
    counts = torch.bincount(Sampler()(logits.expand(count, -1).contiguous(), batch), minlength=vocab_size)
    expected = logits[0].double().softmax(-1) * count
    assert float(((counts - expected) ** 2 / expected).sum()) < 80.0  # 39 degrees of freedom: 1 in 10,000 is above


@pytest.mark.parametrize("limits", [{}, {"top_k": 400}, {"top_p": 0.9999}, {"top_k": 3, "temperature": 0.01}])
@pytest.mark.parametrize("u", [0.0, ALMOST_ONE])
def test_extreme_noise_never_draws_the_impossible(limits: dict[str, Any], u: float) -> None:
    logits = random_logits(1, 500)
    logits[0, :7] = logits[0, 100:200] = logits[0, -9:] = -math.inf
    token = int(Sampler((8,))(logits.clone(), fixed_noise([u], **limits)))
    assert logits[0, token] > -math.inf
    if limits.get("top_k") == 3:
        assert token in logits[0].topk(3).indices.tolist()


def test_extreme_limits() -> None:
    logits = random_logits(6, 300)
    best = logits.argmax(dim=-1).tolist()
    for limits in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}, {"temperature": 2.0, "top_p": 1e-9}):
        assert Sampler()(logits.clone(), batch_of([SamplingParams(**limits)] * 6)).tolist() == best, limits
    everything = Sampler()(logits.clone(), fixed_noise(grid(6), top_k=300))
    assert everything.tolist() == Sampler()(logits.clone(), fixed_noise(grid(6), top_k=10**9)).tolist()


@pytest.mark.parametrize("widths", [(), (4,), (256,)])
def test_equal_logits_rank_by_id(widths: tuple[int, ...]) -> None:
    count = 64
    logits = torch.zeros(count, 300)
    logits[:, 40:] = 1.0
    assert batch_of([SamplingParams(temperature=0.0)]).all_greedy
    assert Sampler(widths)(logits.clone(), batch_of([SamplingParams(temperature=0.0)] * count)).tolist() == [40] * count
    drawn = Sampler(widths)(logits.clone(), fixed_noise(grid(count), top_k=16)).tolist()
    assert drawn == [40 + index // 4 for index in range(count)]


def test_a_row_does_not_notice_its_mates() -> None:
    logits = random_logits(48, 1000, spread=2.0)
    params = [SamplingParams(**MIXES[row % len(MIXES)], seed=row) for row in range(len(logits))]
    together = Sampler((64,))(logits.clone(), batch_of(params)).tolist()
    alone = [int(Sampler((64,))(logits[row : row + 1].clone(), batch_of([params[row]]))) for row in range(len(params))]
    assert together == alone
    order = torch.randperm(len(params), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = Sampler((64,))(logits[order].clone(), batch_of([params[row] for row in order])).tolist()
    assert shuffled == [alone[row] for row in order]


def test_noise_follows_seed_and_position() -> None:
    logits = torch.zeros(1, 4096)

    def token(seed: int, num_tokens: int) -> int:
        return int(Sampler()(logits.clone(), batch_of([SamplingParams(seed=seed)], num_tokens=[num_tokens])))

    assert token(5, 10) == token(5, 10)
    assert len({token(seed, 10) for seed in (5, 6, -5, 2**63 - 1, -(2**63))}) == 5
    assert len({token(5, num_tokens) for num_tokens in range(20)}) > 15


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_every_way_to_stop(temperature: float) -> None:
    logits = torch.zeros(2, 50)
    logits[:, EOS], logits[:, 9], logits[:, 20] = 90.0, 80.0, 50.0
    params = SamplingParams(temperature=temperature, min_tokens=4, stop_token_ids=[9])
    free = SamplingParams(temperature=temperature)
    for num_output, expected in ((0, 20), (3, 20), (4, EOS)):
        tokens = Sampler()(logits.clone(), batch_of([params, free], num_output=num_output))
        assert tokens.tolist() == [expected, EOS], num_output


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[2], MIXES[6]])
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
