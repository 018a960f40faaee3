"""How the hidden states of a text become one vector, and what that vector is good for. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PoolingType = Literal["mean", "cls", "last"]
PoolingTask = Literal["embed", "classify", "score", "reward"]
Activation = Literal["softmax", "sigmoid", "identity"]

HEAD_TASKS: tuple[PoolingTask, ...] = ("classify", "reward")  # of every model with a classification head
SCORE: PoolingTask = "score"  # and of one with a single label


@dataclass(frozen=True)
class PoolerConfig:
    """What a pooling model does with its last hidden states: their mean, or the first or last one, then a head."""

    pooling: PoolingType
    tasks: tuple[PoolingTask, ...]
    normalize: bool = False  # embeddings to length 1, unless a request says otherwise
    labels: tuple[str, ...] = ()  # of the classification head; none: the vector itself is the result
    activation: Activation = "identity"  # of what the head says
    max_tokens: int | None = None  # of a text, by its authors' choice; the positions it knows may be more
    lower_case: bool = False  # texts, before they become tokens
    matryoshka_sizes: tuple[int, ...] | None = None  # to which embeddings may be cut; (): any; None: not trained for it

    @property
    def has_head(self) -> bool:
        return bool(self.labels)


@dataclass(frozen=True)
class EncoderConfig:
    """What only models have whose tokens see all others."""

    num_token_types: int  # 1: tokens have none
    first_position: int  # the row of the position table that is a text's first
