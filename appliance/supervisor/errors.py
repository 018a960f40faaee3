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


class ModelUnavailable(Exception):
    """The model exists and may answer later: after about `retry_after_s`."""

    def __init__(
        self, reason: str, retry_after_s: float, code: Literal["model_loading", "draining", "engine_dead"]
    ) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.code = code
