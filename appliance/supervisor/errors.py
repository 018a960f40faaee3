"""Why a model cannot answer right now, or at all."""

from __future__ import annotations

from typing import Literal


class UnknownModel(Exception):
    """No model of this library has that id or alias. `known` are the ids there are."""

    def __init__(self, name: str, known: list[str]) -> None:
        self.name = name
        self.known = known
        listed = ", ".join(known) if known else "none; pull one with `inferd pull SOURCE`"
        super().__init__(f"The model '{name[:200]}' does not exist. Models here: {listed}.")


UnavailableCode = Literal[
    "model_loading", "draining", "engine_dead", "insufficient_memory", "not_supported", "not_loaded"
]


class ModelUnavailable(Exception):
    """The model exists, and may answer after about `retry_after_s`; None: not before somebody changes something."""

    def __init__(self, reason: str, retry_after_s: float | None, code: UnavailableCode) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.code = code
