"""How far a pull is, told to whoever asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Phase = Literal["resolving", "waiting", "downloading", "verifying", "importing"]


class PullProgress(msgspec.Struct, frozen=True):
    """`bytes_done` of `bytes_total` (None: unknown) of `file`; both are 0 and None where a phase has no bytes.

    `model`: its id, once the source has said what there is.
    """

    phase: Phase
    file: str = ""
    bytes_done: int = 0
    bytes_total: int | None = None
    model: str = ""


Report = Callable[[PullProgress], None]


def ignore_progress(progress: PullProgress) -> None:
    """For a caller that only wants the end."""
