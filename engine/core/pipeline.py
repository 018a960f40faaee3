"""Steps on their way through the executor."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from inferd.engine.core.clock import Clock, steady_time
from inferd.engine.core.grammar import GrammarManager
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.executor.base import Executor

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Launched:
    output: SchedulerOutput
    launched_at: float
    executed: Future[None]
    sampled: Future[ModelRunnerOutput] | None = None  # None while the grammars wait for the tokens of steps before it


@dataclass(frozen=True, slots=True)
class Landed:
    """A step whose result is there."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    at: float  # by the engine's clock
    duration_s: float  # since its launch, or since the step before it landed


class Pipeline:
    """Launches steps and takes in their results, in order. An exception of the executor is logged with the step.

    A step with a row under a grammar whose newest token is still on its way is launched too; only its sampling waits
    until the steps before it are taken in: `has_unsampled` says so, and `sample` does it once it is the only one.
    """

    def __init__(
        self,
        executor: Executor,
        grammar: GrammarManager | None,
        depth: int,
        describe: Callable[[], Any],
        clock: Clock = steady_time,
    ) -> None:
        """`depth`: steps that may be on their way at once. `describe` gives the engine's state for the log."""
        self._executor = executor
        self._grammar = grammar
        self._depth = depth
        self._describe = describe
        self._clock = clock
        self._launched: deque[_Launched] = deque()  # oldest first
        self._landed_at = 0.0  # the step before

    def __len__(self) -> int:
        return len(self._launched)

    @property
    def is_full(self) -> bool:
        return len(self._launched) >= self._depth

    @property
    def has_unsampled(self) -> bool:
        return bool(self._launched) and self._launched[-1].sampled is None

    def launch(self, output: SchedulerOutput) -> None:
        with self._blamed_on(output):
            step = _Launched(output, self._clock(), self._executor.execute_model(output))
        must_wait = self._grammar is not None and bool(self._launched) and self._grammar.must_wait(output)
        self._launched.append(step)
        if not must_wait:
            self.sample()

    def sample(self) -> None:
        """The newest step."""
        step = self._launched[-1]
        bitmask = self._grammar.bitmask(step.output) if self._grammar is not None else None
        with self._blamed_on(step.output):
            step.sampled = self._executor.sample_tokens(bitmask)

    def take_in(self) -> Landed:
        """The oldest step, when the workers are done with it."""
        step = self._launched.popleft()
        assert step.sampled is not None, "a step is sampled before the one after it is taken in"
        with self._blamed_on(step.output):
            step.executed.result()
            result = step.sampled.result()
        now = self._clock()
        duration_s, self._landed_at = now - max(step.launched_at, self._landed_at), now
        return Landed(step.output, result, now, duration_s)

    @contextmanager
    def _blamed_on(self, output: SchedulerOutput) -> Iterator[None]:
        try:
            yield
        except Exception:
            scheduled, state = output.num_scheduled_tokens, self._describe()
            logger.error("step %d failed; tokens scheduled: %s; state: %s", output.step, scheduled, state)
            raise
