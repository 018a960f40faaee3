"""The processors that every engine has: what a request forbids, prefers, or must not do yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.sampling.processors import AddedRow, ProcessorContext, RowProcessor, StepRows
from inferd.engine.upload import upload

_NEVER = float("-inf")


class _NotInvariant:
    def is_argmax_invariant(self) -> bool:
        return False


class AllowedTokens(_NotInvariant, RowProcessor[NDArray[np.int64]]):
    """`allowed_token_ids`: no token but these."""

    def make_state(self, added: AddedRow) -> NDArray[np.int64] | None:
        allowed = added.params.allowed_token_ids
        return None if allowed is None else np.unique(np.array(allowed, np.int64))

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        found = self.states_of(step)
        if not found:
            return logits
        places = _places(found, logits.device)
        kept = logits[places]
        logits.index_fill_(0, upload([_indices(index for index, _ in found)], logits.device)[0], _NEVER)
        return logits.index_put_(places, kept)


class BadWords(_NotInvariant, RowProcessor[list[NDArray[np.int64]]]):
    """`bad_words_token_ids`: the last token of each may not follow on the others of it."""

    def make_state(self, added: AddedRow) -> list[NDArray[np.int64]] | None:
        return [np.array(token_ids, np.int64) for token_ids in added.params.bad_words_token_ids] or None

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        banned = [(index, self._last_tokens(words, step, index)) for index, words in self.states_of(step)]
        return _ban(logits, [(index, token_ids) for index, token_ids in banned if token_ids.size])

    @staticmethod
    def _last_tokens(words: list[NDArray[np.int64]], step: StepRows, index: int) -> NDArray[np.int64]:
        """Of the words of which the output has all but that. What the prompt ends with begins no word."""
        output = step.output_token_ids(index)
        last = [
            word[-1]
            for word in words
            if len(word) - 1 <= len(output) and np.array_equal(output[len(output) - len(word) + 1 :], word[:-1])
        ]
        return np.array(last, np.int64)


@dataclass(frozen=True)
class _Stops:
    min_tokens: int
    token_ids: NDArray[np.int64]


class MinTokens(_NotInvariant, RowProcessor[_Stops]):
    """`min_tokens`: no token that could end the request, until there are so many."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__()
        self._eos_token_ids = frozenset(context.eos_token_ids)

    def make_state(self, added: AddedRow) -> _Stops | None:
        stops = sorted(self._eos_token_ids.union(added.params.stop_token_ids))
        return _Stops(added.params.min_tokens, np.array(stops, np.int64)) if added.params.min_tokens and stops else None

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        short = [
            (index, stops.token_ids)
            for index, stops in self.states_of(step)
            if step.num_output_tokens(index) < stops.min_tokens
        ]
        return _ban(logits, short)


@dataclass(frozen=True)
class _Biases:
    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]


class LogitBias(_NotInvariant, RowProcessor[_Biases]):
    """`logit_bias`: added as it is. A bias never brings back what is forbidden."""

    def make_state(self, added: AddedRow) -> _Biases | None:
        wanted = added.params.logit_bias
        return (
            _Biases(np.array(list(wanted), np.int64), np.array(list(wanted.values()), np.float32)) if wanted else None
        )

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        found = self.states_of(step)
        if not found:
            return logits
        places = _places([(index, biases.token_ids) for index, biases in found], logits.device)
        (values,) = upload([np.concatenate([biases.values for _, biases in found])], logits.device)
        return logits.index_put_(places, logits[places] + values)


def _ban(logits: Tensor, found: list[tuple[int, NDArray[np.int64]]]) -> Tensor:
    if found:
        logits.index_put_(_places(found, logits.device), torch.full((), _NEVER, device=logits.device))
    return logits


def _places(found: list[tuple[int, NDArray[np.int64]]], device: torch.device) -> tuple[Tensor, ...]:
    """Parallel row indices and token ids, i64, of [(row index, its token ids)]."""
    counts = [len(token_ids) for _, token_ids in found]
    rows = _indices(index for index, _ in found).repeat(counts)
    return tuple(upload([rows, np.concatenate([token_ids for _, token_ids in found])], device))


def _indices(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)
