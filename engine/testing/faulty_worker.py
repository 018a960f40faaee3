"""A worker process whose last rank fails in its third step; started in place of `executor.worker_main`."""

from __future__ import annotations

from inferd.engine.core.output import SchedulerOutput
from inferd.engine.executor.wire import WorkerStart
from inferd.engine.executor.worker_main import main
from inferd.engine.worker.parallel_state import ParallelState
from inferd.engine.worker.worker import Worker

FAILING_STEP = 3


class FaultyWorker(Worker):
    """The other ranks wait for this one in the middle of their forward pass."""

    num_steps = 0

    def execute_model(self, output: SchedulerOutput) -> None:
        self.num_steps += 1
        if self.num_steps == FAILING_STEP:
            raise ArithmeticError("planted in the forward pass")
        super().execute_model(output)


def make_worker(start: WorkerStart, state: ParallelState) -> Worker:
    kind = FaultyWorker if start.rank == start.num_ranks - 1 else Worker
    return kind(start.config, state)


if __name__ == "__main__":
    main(make_worker=make_worker)
