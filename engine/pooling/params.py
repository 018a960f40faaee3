"""What a caller may ask of a pooling model."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec

from inferd.engine.errors import InvalidRequest
from inferd.engine.pooling.config import PoolingTask

ALL_THAT_FITS = -1  # for `truncate_prompt_tokens`: as many tokens as the model takes
TASKS = cast("tuple[PoolingTask, ...]", get_args(PoolingTask))
_MOST = 2**31 - 1


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One text's embedding, classification, score or reward; valid once constructed.

    Raises `InvalidRequest` from the constructor (a `msgspec.ValidationError` when decoded), naming the field.
    """

    task: PoolingTask = "embed"
    normalize: bool | None = None  # an embedding to length 1; None: as the model's authors do
    dimensions: int | None = None  # the first so many of an embedding, normalised after the cut
    activation: bool | None = None  # turn what a head says into probabilities; None: all but rewards
    truncate_prompt_tokens: int | None = None  # a longer text loses its end; -1: what does not fit

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidRequest(f"unknown task {self.task!r}; there are: {', '.join(TASKS)}", param="task")
        for name in ("normalize", "activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidRequest(f"{name} must be true or false", param=name)
        self._check_count("dimensions", self.dimensions, 1)
        self._check_count("truncate_prompt_tokens", self.truncate_prompt_tokens, ALL_THAT_FITS)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 or at least 1, got 0", param="truncate_prompt_tokens"
            )
        foreign = ("activation",) if self.task == "embed" else ("normalize", "dimensions")
        for name in foreign:
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name} has no meaning for the task {self.task}; leave it out", param=name)

    def _check_count(self, name: str, value: Any, low: int) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{name} must be a whole number, got {value!r}", param=name)
        if not low <= value <= _MOST:
            raise InvalidRequest(f"{name} must be between {low} and {_MOST}, got {value}", param=name)


class PoolingInput(msgspec.Struct, array_like=True, frozen=True):
    """What a request to a pooling model has beside its tokens."""

    params: PoolingParams
    token_types: list[int] | None = None  # one a token: which text of a pair it is of; None: all are of the first
