"""Why a model does not run, and when it is tried again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from inferd.engine.errors import EngineError

FailureKind = Literal["load_failed", "wake_failed", "sleep_failed", "engine_died", "engine_hung"]


@dataclass(frozen=True)
class Failure:
    kind: FailureKind
    retry_at: float  # monotonic seconds; before that nobody tries
    by_itself: bool  # tried again then even if nobody asks
    error: BaseException | None = None

    @property
    def retry_in_s(self) -> float:
        return max(self.retry_at - time.monotonic(), 0.0)

    @property
    def reason(self) -> str:
        """What a client may know: the error itself names files of this machine, and the log has it."""
        if self.kind == "engine_died":
            return "its engine process ended"
        if self.kind == "engine_hung":
            return "its engine process stopped answering and was ended"
        code = self.error.code if isinstance(self.error, EngineError) else "internal"
        act = {"load_failed": "load", "wake_failed": "wake", "sleep_failed": "sleep"}[self.kind]
        return f"its last {act} failed ({code}, the server's log has the cause)"
