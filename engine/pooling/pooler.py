"""From the hidden states of a step's tokens to one vector of each text that is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.pooling.config import PoolingType


@dataclass(frozen=True, slots=True)
class Span:
    """One request's tokens of a step: [start, start + length) of all its tokens."""

    request_id: str
    start: int
    length: int
    num_before: int  # tokens of the request that earlier steps computed
    is_last: bool

    @property
    def end(self) -> int:
        return self.start + self.length


class Pooler:
    """The mean of a text's states, its first or its last one, in float32.

    What a chunk of a longer text adds is kept until the text is complete or forgotten. Each row's own states are added
    up, one row after the other, so that a text's vector does not depend on those beside it.
    """

    def __init__(self, pooling: PoolingType) -> None:
        self._pool = {"mean": self._mean, "cls": self._first, "last": self._last}[pooling]
        self._kept: dict[str, Tensor] = {}  # [h] by request: the sum so far, or the first state

    def pool(self, hidden: Tensor, spans: Sequence[Span]) -> Tensor:
        """hidden[t, h] -> [m, h] f32, of the m spans that are their request's last, in order."""
        return self._pool(hidden, spans)

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def _last(self, hidden: Tensor, spans: Sequence[Span]) -> Tensor:
        return _rows(hidden, [span.end - 1 for span in spans if span.is_last])

    def _first(self, hidden: Tensor, spans: Sequence[Span]) -> Tensor:
        if all(span.is_last and not span.num_before for span in spans):
            return _rows(hidden, [span.start for span in spans])
        for span in spans:
            if not span.num_before:
                self._kept[span.request_id] = hidden[span.start].float()
        return _stack([self._kept.pop(span.request_id) for span in spans if span.is_last], hidden)

    def _mean(self, hidden: Tensor, spans: Sequence[Span]) -> Tensor:
        means = []
        for span in spans:
            total = hidden[span.start : span.end].sum(0, dtype=torch.float32)
            if (before := self._kept.pop(span.request_id, None)) is not None:
                total += before
            if span.is_last:
                means.append(total / (span.num_before + span.length))
            else:
                self._kept[span.request_id] = total
        return _stack(means, hidden)


def _rows(hidden: Tensor, indices: list[int]) -> Tensor:
    return hidden[torch.tensor(indices, dtype=torch.int64, device=hidden.device)].float()


def _stack(vectors: list[Tensor], hidden: Tensor) -> Tensor:
    return torch.stack(vectors) if vectors else hidden.new_empty((0, hidden.shape[1]), dtype=torch.float32)
