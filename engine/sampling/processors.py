"""The protocol of what changes logits on request, for a whole batch at once.

A processor follows the persistent batch by the differences that it is told before each step, and changes the logits of
the step's rows. One that is argmax-invariant never changes which token is the most likely: rows that are sampled
greedily pass it by, and it comes after temperature. All others come before it, for all rows.

Processors that are not built in are classes named in the entry point group `inferd.logits_processors`; see `plugins`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.params import SamplingParams

State = TypeVar("State")


@dataclass(frozen=True)
class ProcessorContext:
    """What a processor may know of its engine."""

    vocab_size: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True)
class AddedRow:
    """A request that now has the row; whatever had it before is gone, whether it was removed or not."""

    row: int
    request_id: str
    params: SamplingParams
    prompt_token_ids: Sequence[int]


@dataclass
class BatchUpdate:
    """What happened to the persistent batch's rows; to be followed in the order of these fields.

    A move is one way: what was in `target` is gone, and `source` is empty afterwards.
    """

    removed: list[int] = field(default_factory=list)
    added: list[AddedRow] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)  # (source, target)

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.moved)


class StepRows:
    """The rows whose logits are processed, and the tokens that each of them knows.

    A request whose drafts are checked has several, one behind the other: the first knows its tokens, and each of the
    others one draft more, as if it had come.
    """

    def __init__(
        self,
        rows: NDArray[np.intp],
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int64],
        num_prompt_tokens: NDArray[np.int64],
    ) -> None:
        """`rows[m]` are rows of the persistent batch, and `num_tokens[m]` says how many tokens each of them knows; the
        other arrays are that batch's, one line a row."""
        self.rows = rows
        self._token_ids = token_ids
        self._num_tokens = num_tokens
        self._num_prompt_tokens = num_prompt_tokens

    def __len__(self) -> int:
        return len(self.rows)

    def token_ids(self, index: int) -> NDArray[np.int32]:
        """Prompt and output of the step's row `index`, to read; good until the step ends."""
        return self._token_ids[self.rows[index], : self._num_tokens[index]]

    def output_token_ids(self, index: int) -> NDArray[np.int32]:
        row = self.rows[index]
        return self._token_ids[row, self._num_prompt_tokens[row] : self._num_tokens[index]]

    def num_output_tokens(self, index: int) -> int:
        return int(self._num_tokens[index] - self._num_prompt_tokens[self.rows[index]])

    def take(self, indices: NDArray[np.intp]) -> StepRows:
        return StepRows(self.rows[indices], self._token_ids, self._num_tokens[indices], self._num_prompt_tokens)


class LogitsProcessor(Protocol):
    """One object serves a batch for the engine's whole life; its calls come from one thread.

    A class behind an entry point is constructed with a `ProcessorContext`, and may have a static method
    `validate_params(params: SamplingParams)` that raises `InvalidRequest` for a request that it cannot serve.
    """

    def is_argmax_invariant(self) -> bool:
        """A constant. A false yes makes greedy requests differ from what they ask, without any error."""
        ...

    def update_state(self, update: BatchUpdate) -> None:
        """Called before a step whenever rows changed."""
        ...

    def is_active(self) -> bool:
        """False when no request in the batch asks for anything: then `apply` is not called."""
        ...

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        """logits[m, vocab] f32, one line for each row of `step`; may be changed in place. Waits for no device.

        A row's result may depend on that row's request and the tokens that the row knows alone: in the next step a
        request may know fewer than a row of it did in this one.
        """
        ...


class RowProcessor(ABC, Generic[State]):
    """Base of processors that keep something for those rows whose request asks for it."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    @abstractmethod
    def make_state(self, added: AddedRow) -> State | None:
        """None for a request that asks for nothing here."""

    def is_active(self) -> bool:
        return bool(self._states)

    def update_state(self, update: BatchUpdate) -> None:
        for row in update.removed:
            self._states.pop(row, None)
        for added in update.added:
            state = self.make_state(added)
            if state is None:
                self._states.pop(added.row, None)
            else:
                self._states[added.row] = state
        for source, target in update.moved:
            state = self._states.pop(source, None)
            if state is None:
                self._states.pop(target, None)
            else:
                self._states[target] = state

    def states_of(self, step: StepRows) -> list[tuple[int, State]]:
        """(index in the step, state) of each row that has one."""
        states = self._states
        return [(index, states[row]) for index, row in enumerate(step.rows.tolist()) if row in states]


RowFunction = Callable[[NDArray[np.int32], Tensor], Tensor]


class FunctionProcessor(RowProcessor[RowFunction]):
    """Adapts functions of one request, `(output_token_ids, logits[vocab]) -> logits[vocab]`, to a batch.

    Costs a few calls per row and step. Not argmax-invariant, since nothing is known of the functions.
    """

    def __init__(self, make_function: Callable[[SamplingParams], RowFunction | None]) -> None:
        super().__init__()
        self._make_function = make_function

    def is_argmax_invariant(self) -> bool:
        return False

    def make_state(self, added: AddedRow) -> RowFunction | None:
        return self._make_function(added.params)

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        for index, function in self.states_of(step):
            logits[index] = function(step.output_token_ids(index), logits[index])
        return logits
