"""Tokens that come out of checking drafts are distributed as if there had been none; with a seed they are the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inferd.engine.params import SamplingParams
from inferd.engine.sampling.batch import SamplingColumns
from inferd.engine.sampling.sampler import NO_TOKEN, Sampler
from inferd.engine.spec.rejection import NO_DRAFT, DraftChecks, count_standing, standing_tokens

CPU = torch.device("cpu")
VOCAB = 6
NUM_REQUESTS = 6_000
NUM_TOKENS = 3  # of each request
NUM_PROMPT_TOKENS = 5
LOGITS = torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(1)) * 1.5  # of what follows on each token

Tokens = NDArray[np.int64]
Draft = Callable[[Tokens], Tokens]  # last tokens [r] → guesses [r, k]

LIMITS = {
    "plain": SamplingParams(temperature=0.9),
    "top-k": SamplingParams(temperature=1.2, top_k=4),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.1, min_p=0.15),
}


def likeliest(last: Tokens) -> Tokens:
    """Two guesses, as a good drafter makes them."""
    first = LOGITS.argmax(dim=-1).numpy()[last]
    return np.stack([first, LOGITS.argmax(dim=-1).numpy()[first]], axis=1)


def arbitrary(last: Tokens) -> Tokens:
    """Three guesses, of which many are bad; some cannot come at all."""
    return np.stack([(last + step) % VOCAB for step in (1, 3, 4)], axis=1)


def one_for_all(last: Tokens) -> Tokens:
    return np.full((len(last), 1), 2)


DRAFTERS: dict[str, Draft] = {"likeliest": likeliest, "arbitrary": arbitrary, "one for all": one_for_all}


class Requests:
    """Many requests with the same parameters, and a seed of their own; each begins with token 0."""

    def __init__(self, params: SamplingParams, number: int = NUM_REQUESTS) -> None:
        self.columns = SamplingColumns(number)
        for row in range(number):
            self.columns.set(row, params, row * 7919 + 1)
        self.token_ids = np.zeros((number, 1 + NUM_TOKENS), np.int64)
        self.counts = np.ones(number, np.int64)  # tokens, the first one included

    def step(self, draft: Draft | None) -> tuple[Tokens, Tokens, Tokens]:
        """One step of those that miss tokens: their rows, how many tokens each got, and their drafts."""
        rows = np.flatnonzero(self.counts <= NUM_TOKENS)
        last = self.token_ids[rows, self.counts[rows] - 1]
        drafts = np.zeros((len(rows), 0), np.int64) if draft is None else draft(last)
        inputs = np.concatenate([last[:, None], drafts], axis=1)
        lengths = inputs.shape[1]
        num_known = NUM_PROMPT_TOKENS + self.counts[rows][:, None] + np.arange(lengths)
        checks = DraftChecks(
            num_known.ravel(),
            np.concatenate([drafts, np.full((len(rows), 1), NO_DRAFT)], axis=1).ravel(),
            np.arange(len(rows)) * lengths,
        )
        names = [str(row) for row in rows.repeat(lengths)]
        batch = self.columns.select(rows.repeat(lengths), names, checks.num_known, CPU)
        picked = Sampler()(LOGITS[inputs.ravel()].clone(), batch).numpy()
        starts, counts = count_standing(picked, checks if draft is not None else None)
        for row, found in zip(rows, standing_tokens(names, picked, starts, counts).values(), strict=True):
            kept = found[: 1 + NUM_TOKENS - self.counts[row]]
            self.token_ids[row, self.counts[row] : self.counts[row] + len(kept)] = kept
            self.counts[row] += len(kept)
        return rows, counts, drafts

    def run(self, draft: Draft | None) -> NDArray[np.int64]:
        """[requests, NUM_TOKENS]"""
        while (self.counts <= NUM_TOKENS).any():
            self.step(draft)
        return self.token_ids[:, 1:]


def kept_probs(params: SamplingParams) -> NDArray[np.float64]:
    """[last token, next token], by the definitions."""
    probs = torch.softmax(LOGITS.double() / params.temperature, dim=-1).numpy()
    kept = probs * (probs >= params.min_p * probs.max(axis=1, keepdims=True))
    if params.top_k:
        kept = kept * (kept >= np.sort(kept, axis=1)[:, [-params.top_k]])
    above = np.array([[line[line > own].sum() for own in line] for line in kept])
    kept = kept * (above < params.top_p * kept.sum(axis=1, keepdims=True))
    return kept / kept.sum(axis=1, keepdims=True)


def chi_square(observed: NDArray[np.int64], expected: NDArray[np.float64]) -> tuple[float, float]:
    """The statistic, and the value that it stays below in 999 of 1000 cases (Wilson and Hilferty's approximation)."""
    possible = expected > 0
    assert not observed[~possible].any()
    statistic = float((((observed - expected) ** 2)[possible] / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    return statistic, freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("limits", LIMITS)
def test_tokens_are_distributed_as_the_target_is(drafter: str, limits: str) -> None:
    """The joint distribution of all tokens of a request: drafts are checked at every place, behind others or not."""
    params = LIMITS[limits]
    found = Requests(params).run(DRAFTERS[drafter])
    probs = kept_probs(params)
    expected = probs[0][:, None, None] * probs[:, :, None] * probs[None, :, :]
    observed = np.zeros(expected.shape, np.int64)
    np.add.at(observed, tuple(found.T), 1)
    expected = expected * NUM_REQUESTS
    common = expected >= 5  # the others are counted together
    statistic, limit = chi_square(
        np.append(observed[common], observed[~common].sum()), np.append(expected[common], expected[~common].sum())
    )
    assert statistic < limit


@pytest.mark.parametrize("limits", LIMITS)
def test_it_accepts_and_replaces_as_the_textbook_does(limits: str) -> None:
    """A draft d that is certain of itself: accepted with probability p(d), else replaced by p without d, normed."""
    requests, probs = Requests(LIMITS[limits]), kept_probs(LIMITS[limits])[0]
    rows, counts, drafts = requests.step(one_for_all)
    draft = int(drafts[0, 0])
    accepted = counts > 1
    of_accepting = np.array([probs[draft], 1 - probs[draft]])
    statistic, limit = chi_square(np.array([accepted.sum(), (~accepted).sum()]), of_accepting * len(rows))
    assert statistic < limit
    replaced = np.bincount(requests.token_ids[rows[~accepted], 1], minlength=VOCAB)
    residual = np.where(np.arange(VOCAB) == draft, 0.0, probs)
    statistic, limit = chi_square(replaced, residual / residual.sum() * (~accepted).sum())
    assert statistic < limit


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("limits", [*LIMITS, "greedy"])
def test_tokens_are_those_without_drafts(drafter: str, limits: str) -> None:
    """Not only their distribution: each is drawn with the noise of its own place."""
    params = LIMITS.get(limits, SamplingParams(temperature=0.0))
    plain = Requests(params, 1000).run(None)
    assert (Requests(params, 1000).run(DRAFTERS[drafter]) == plain).all()


def stand(rows: list[list[tuple[int, int]]]) -> list[list[int]]:
    """What stands of (picked, draft) pairs, by request."""
    flat = [pair for pairs in rows for pair in pairs]
    lengths = np.array([len(pairs) for pairs in rows])
    picked, drafts = np.array([pair[0] for pair in flat]), np.array([pair[1] for pair in flat])
    checks = DraftChecks(np.zeros(len(flat), np.int64), drafts, lengths.cumsum() - lengths)
    starts, counts = count_standing(picked, checks)
    names = [str(index) for index, pairs in enumerate(rows) for _ in pairs]
    return list(standing_tokens(names, picked, starts, counts).values())


def test_drafts_stand_up_to_the_first_that_differs() -> None:
    assert stand(
        [
            [(5, 5), (6, 6), (7, NO_DRAFT)],  # all, and one on top
            [(5, 5), (9, 6), (8, 8), (7, NO_DRAFT)],  # what is right behind a wrong one is of no use
            [(4, 5), (6, NO_DRAFT)],
            [(3, NO_DRAFT)],
        ]
    ) == [[5, 6, 7], [5, 9], [4], [3]]


def test_a_place_without_a_token_comes_again_alone() -> None:
    """Only then does its request end: in plain steps it would have got the tokens before it too."""
    assert stand(
        [
            [(5, 5), (NO_TOKEN, 6), (7, NO_DRAFT)],
            [(NO_TOKEN, 5), (6, NO_DRAFT)],
            [(5, 5), (6, 6), (NO_TOKEN, NO_DRAFT)],
        ]
    ) == [[5], [NO_TOKEN], [5, 6]]
