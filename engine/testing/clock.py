"""Time that goes on only when a test says so, or with every step of a fake executor."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from inferd.engine.core.output import ModelRunnerOutput
from inferd.engine.testing.fake_executor import FakeExecutor


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)


class TimedExecutor(FakeExecutor):
    """Every step takes `step_s` of a `FakeClock`."""

    def __init__(self, clock: FakeClock, step_s: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.clock = clock
        self.step_s = step_s

    def sample_tokens(self, bitmask: Any | None = None) -> Future[ModelRunnerOutput]:
        self.clock.advance(self.step_s)
        return super().sample_tokens(bitmask)
