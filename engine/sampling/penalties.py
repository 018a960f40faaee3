"""Penalties for tokens that are in the text already. They touch the logits of those tokens and of no others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.sampling.processors import AddedRow, RowProcessor, StepRows
from inferd.engine.upload import upload

_FIRST_ROOM = 256


@dataclass(frozen=True)
class _Weights:
    repetition: float
    presence: float
    frequency: float


class _SeenTokens:
    """The different tokens of one request and how often each is in its output, kept up as the output grows."""

    def __init__(self, weights: _Weights, prompt_token_ids: NDArray[np.int64]) -> None:
        self.weights = weights
        # Presence and frequency look at the output alone, so without a repetition penalty the prompt is of no use.
        seen = np.unique(prompt_token_ids) if weights.repetition != 1.0 else prompt_token_ids[:0]
        room = max(_FIRST_ROOM, 2 * len(seen))
        self._places = {token_id: place for place, token_id in enumerate(seen.tolist())}
        self._token_ids = np.zeros(room, np.int64)
        self._token_ids[: len(seen)] = seen
        self._counts = np.zeros(room, np.float32)
        self._counted: list[int] = []  # the output, in order
        self._num_prompt_places = len(seen)

    def count(self, output_token_ids: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids and their counts, in the order in which they were first seen.

        The output may have other last tokens than it had before: those were drafts that did not stand.
        """
        counted, num_tokens = self._counted, len(output_token_ids)
        while counted and (len(counted) > num_tokens or counted[-1] != output_token_ids[len(counted) - 1]):
            self._take_back(counted.pop())
        for token_id in output_token_ids[len(counted) :].tolist():
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token_id
            self._counts[place] += 1
            counted.append(token_id)
        used = slice(len(self._places))
        return self._token_ids[used], self._counts[used]

    def _take_back(self, token_id: int) -> None:
        """The last token of the output. Where it was seen first of all, its place is the last one."""
        place = self._places[token_id]
        self._counts[place] -= 1
        if self._counts[place] == 0 and place >= self._num_prompt_places:
            del self._places[token_id]


class Penalties(RowProcessor[_SeenTokens]):
    """Repetition, then frequency and presence. With l a token's logit and c its count in the output:

    l := l / r if l > 0 else l · r, for tokens of prompt and output (Keskar et al., "CTRL", 2019);
    l := l - c · frequency - [c > 0] · presence (as OpenAI's API documents them).
    """

    def is_argmax_invariant(self) -> bool:
        return False

    def make_state(self, added: AddedRow) -> _SeenTokens | None:
        params = added.params
        weights = _Weights(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if weights == _Weights(1.0, 0.0, 0.0):
            return None
        return _SeenTokens(weights, np.asarray(added.prompt_token_ids, np.int64))

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        parts = [self._part(index, seen, step) for index, seen in self.states_of(step)]
        if not parts:
            return logits
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        rows, token_ids, factors, amounts = upload(columns, logits.device)
        own = logits[rows, token_ids]
        own = torch.where(own > 0, own / factors, own * factors) - amounts
        return logits.index_put_((rows, token_ids), own)

    @staticmethod
    def _part(
        index: int, seen: _SeenTokens, step: StepRows
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Row indices, token ids, repetition penalties, and what is subtracted; one entry a token seen."""
        token_ids, counts = seen.count(step.output_token_ids(index))
        weights = seen.weights
        amounts = counts * np.float32(weights.frequency) + (counts > 0) * np.float32(weights.presence)
        factors = np.full(len(token_ids), weights.repetition, np.float32)
        return np.full(len(token_ids), index, np.int64), token_ids, factors, amounts.astype(np.float32)
