"""Catches a logits processor that claims to leave the most likely token alone and does not."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.params import SamplingParams
from inferd.engine.sampling.plugins import ProcessorFactory
from inferd.engine.sampling.processors import AddedRow, BatchUpdate, ProcessorContext, StepRows

_PROMPT_TOKENS = 5
_MAX_OUTPUT_TOKENS = 12


def check_argmax_invariance(
    factory: ProcessorFactory,
    requests: Iterable[SamplingParams],
    *,
    vocab_size: int = 61,
    eos_token_ids: tuple[int, ...] = (2,),
    num_rounds: int = 60,
    seed: int = 0,
) -> None:
    """Raises AssertionError, with the row that shows it, when an argmax-invariant processor changes an argmax.

    `requests` are params that make the processor act. Their logits are random, of several spreads, some of them -inf;
    each round knows other output tokens, and the best tokens are among them more often than not.
    """
    params = list(requests)
    processor = factory(ProcessorContext(vocab_size, len(params), eos_token_ids, torch.device("cpu")))
    if not processor.is_argmax_invariant():
        return
    rng = np.random.default_rng(seed)
    width = _PROMPT_TOKENS + _MAX_OUTPUT_TOKENS
    token_ids = rng.integers(vocab_size, size=(len(params), width), dtype=np.int32)
    processor.update_state(
        BatchUpdate(
            added=[
                AddedRow(row, f"request-{row}", own, token_ids[row, :_PROMPT_TOKENS].tolist())
                for row, own in enumerate(params)
            ]
        )
    )
    num_prompt_tokens = np.full(len(params), _PROMPT_TOKENS)
    for round_ in range(num_rounds):
        num_tokens = np.full(len(params), _PROMPT_TOKENS + round_ * _MAX_OUTPUT_TOKENS // num_rounds)
        logits = _logits(rng, token_ids, num_tokens, vocab_size)
        step = StepRows(np.arange(len(params)), token_ids, num_tokens, num_prompt_tokens)
        changed = processor.apply(logits.clone(), step) if processor.is_active() else logits
        _check(logits, changed, params, round_)


def _logits(
    rng: np.random.Generator, token_ids: NDArray[np.int32], num_tokens: NDArray[np.int64], vocab_size: int
) -> Tensor:
    spread = rng.choice([0.1, 1.0, 10.0])
    logits = torch.from_numpy(rng.normal(size=(len(token_ids), vocab_size)).astype(np.float32) * np.float32(spread))
    logits[torch.from_numpy(rng.random(logits.shape) < 0.1)] = -torch.inf
    for row, known in enumerate(num_tokens):
        best = int(rng.choice([token_ids[row, known - 1], *range(8), rng.integers(vocab_size)]))
        finite = logits[row][logits[row].isfinite()]
        logits[row, best] = finite.max() + float(rng.choice([1e-3, 1.0, 20.0]))
    return logits


def _check(logits: Tensor, changed: Tensor, params: list[SamplingParams], round_: int) -> None:
    if changed.shape != logits.shape:
        raise AssertionError(f"logits of shape {tuple(logits.shape)} came back as {tuple(changed.shape)}")
    for row, own in enumerate(params):
        best = int(logits[row].argmax())
        if not bool(changed[row, best].isfinite()) or bool((changed[row] > changed[row, best]).any()):
            now = int(changed[row].argmax())
            raise AssertionError(
                f"it claims to be argmax-invariant, but in round {round_} the best token of row {row} was {best} "
                f"(logit {logits[row, best]:.4g}, now {changed[row, best]:.4g}) and is {now} "
                f"(logit {logits[row, now]:.4g}, now {changed[row, now]:.4g}); the request: {own}"
            )
