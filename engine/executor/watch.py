"""The thread that hears from workers: their answers, their deaths, and that nothing comes any more."""

from __future__ import annotations

import logging
import os
import threading

from inferd.engine.errors import ConfigError, EngineError, LoadError, NotSupported, WorkerError
from inferd.engine.executor.base import OnFailure
from inferd.engine.executor.calls import PendingCalls
from inferd.engine.executor.shm import RingReader, wait_readable
from inferd.engine.executor.wire import STEP_CALLS, Failed, Sampled, from_worker_decoder, unpack
from inferd.engine.executor.workers import Workers

logger = logging.getLogger(__name__)

_KINDS: dict[str, type[EngineError]] = {kind.code: kind for kind in (ConfigError, LoadError, NotSupported)}
BEHIND_S = 0.1  # a rank may complain of one that ended before that one's end is known
_CHECKS_PER_LIMIT = 4  # nobody wakes the thread when a call is sent, so it looks by itself


class WorkerWatch:
    """Resolves calls as answers come. The first failure ends all calls and all workers, and is told to `on_failure`."""

    def __init__(self, workers: Workers, calls: PendingCalls, step_limit_s: float) -> None:
        self._workers = workers
        self._calls = calls
        self._check_s = step_limit_s / _CHECKS_PER_LIMIT
        self._readers = [RingReader(ring) for ring in workers.replies]
        self._decoder = from_worker_decoder()
        self._lock = threading.Lock()
        self._failure: WorkerError | None = None
        self._callbacks: list[OnFailure] = []
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self.failed_fd = os.eventfd(0, flags)
        """Readable once there was a failure."""
        self._stop_fd = os.eventfd(0, flags)
        self._thread = threading.Thread(target=self._run, name="worker-watch", daemon=True)
        self._thread.start()

    def on_failure(self, callback: OnFailure) -> None:
        """`callback` is called once, from any thread; at once when the failure was before."""
        with self._lock:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def fail(self, error: WorkerError, detail: str = "") -> None:
        """Kills the workers: those that live may wait for one that does not, and what they hold is of no more use."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            callbacks, self._callbacks = self._callbacks, []
        logger.error("%s%s", detail, error)  # before anybody hears of it and adds a log of its own
        self._workers.kill()
        os.eventfd_write(self.failed_fd, 1)
        self._calls.close(error)
        for callback in callbacks:
            callback(error)

    def stop(self) -> None:
        """From now on nothing is a failure. Idempotent; not from a callback."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop_fd, 1)
            self._thread.join()

    def close(self) -> None:
        """After `stop`."""
        for reader in self._readers:
            reader.close()
        os.close(self.failed_fd)
        os.close(self._stop_fd)

    def _run(self) -> None:
        try:
            while self._wait():
                self._read_answers()  # first, since a worker may have said why it ends
                self._look_for_ended(0.0)
                self._look_for_overdue()
        except Exception as error:  # whatever it is, those who wait must hear of it
            logger.exception("the workers cannot be watched any more")
            self.fail(WorkerError(f"what the workers answer cannot be handled: {type(error).__name__}: {error}"))

    def _wait(self) -> bool:
        """For anything that may have happened; False once there is nothing to be watched any more."""
        left_s = self._calls.seconds_left()
        patience_s = self._check_s if left_s is None else min(left_s, self._check_s)
        final = [self._stop_fd, self.failed_fd]
        exits = [process.exit_fd for process in self._workers.processes]
        ready = wait_readable([*final, *exits, *(reader.fd for reader in self._readers)], patience_s)
        return not any(fd in ready for fd in final)

    def _read_answers(self) -> None:
        for rank, reader in enumerate(self._readers):
            while (data := reader.try_read()) is not None:
                answer = self._decoder.decode(data)
                if isinstance(answer, Failed):
                    self._take_failure(rank, answer)
                elif isinstance(answer, Sampled):
                    self._calls.answer(answer.number, rank, answer.output)
                else:
                    self._calls.answer(answer.number, rank, unpack(answer.value))

    def _take_failure(self, rank: int, failed: Failed) -> None:
        broken = WorkerError(f"worker {rank} failed in {failed.name}: {failed.message}")
        if failed.name in STEP_CALLS:
            self._look_for_ended(BEHIND_S)
            self.fail(broken, failed.detail)
            return
        logger.error("%s%s", failed.detail, broken)
        kind = _KINDS.get(failed.code)
        self._calls.answer(failed.number, rank, error=kind(failed.message) if kind else broken)

    def _look_for_ended(self, timeout_s: float) -> None:
        exits = {process.exit_fd: process for process in self._workers.processes}
        ended = wait_readable(list(exits), timeout_s)
        if ended:
            self.fail(WorkerError("; ".join(exits[fd].describe() for fd in ended)))

    def _look_for_overdue(self) -> None:
        late = self._calls.overdue()
        if late is not None:
            states = "; ".join(process.describe() for process in self._workers.processes)
            self.fail(WorkerError(f"{late.name} was not answered within {late.limit_s:g} s: {states}"))
