"""The seam between a worker and whoever guesses what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inferd.engine.core.output import SchedulerOutput


@dataclass(frozen=True)
class DraftRow:
    """One request of the step that has just run. Views, good until the next step."""

    request_id: str
    token_ids: NDArray[
        np.int32
    ]  # prompt and output so far; of a prompt that is still computed, what was computed of it
    block_ids: NDArray[np.int32]  # its block table in the first KV group
    num_wanted: int  # guesses at most; 0: a prompt of which more is to come


class Drafter(Protocol):
    """Guesses are checked by the model, so they cost time when they are wrong and never change a token.

    `follow` comes before a step runs, `propose` after it, both for every step and in their order.
    """

    def follow(self, output: SchedulerOutput) -> None:
        """What the scheduler changes with this step: requests that leave, blocks that change hands."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> dict[str, list[int]]:
        """By request id, up to `num_wanted` tokens that may follow on its `token_ids`.

        `rows` are those of the step that are to get guesses; one for which nothing comes to mind is left out.
        """
        ...
