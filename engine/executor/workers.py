"""The worker processes of one engine: started together, ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import psutil

from inferd.engine.config import EngineConfig
from inferd.engine.executor.shm import Ring
from inferd.engine.executor.wire import WorkerStart, encode_start

ASK_GRACE_S = 2.0  # for workers that were asked to end
TERM_GRACE_S = 1.0  # for those that got SIGTERM after that


class WorkerProcess:
    """One child. `exit_fd` is readable (end of file) once it has ended."""

    def __init__(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self._popen = popen
        self.exit_fd, self._exit_write_fd = os.pipe()
        self._waiter = threading.Thread(target=self._wait_for_exit, name=f"worker-{rank}-exit", daemon=True)
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Of no effect on one that has ended."""
        self._popen.send_signal(number)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it has ended."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Once it has ended."""
        self._waiter.join()
        os.close(self.exit_fd)

    def describe(self) -> str:
        """Who it is and how it is, for an error message."""
        code = self._popen.poll()
        if code is None:
            state = "is gone"
            with contextlib.suppress(psutil.Error):
                state = f"is {psutil.Process(self.pid).status()}"
        elif code < 0:
            names = {int(known): known.name for known in signal.Signals}
            state = f"was ended by {names.get(-code, f'signal {-code}')}"
        else:
            state = f"ended with exit code {code}"
        return f"worker {self.rank} (process {self.pid}) {state}"

    def _wait_for_exit(self) -> None:
        self._popen.wait()
        os.close(self._exit_write_fd)


class Workers:
    """Children that end when this process does; start them from the main thread so that the kernel sees to that too.

    `steps` is the ring to all of them, `replies` one ring from each.
    """

    def __init__(self, config: EngineConfig, num_ranks: int, entry: str) -> None:
        """`entry`: the module that a child runs."""
        self.steps = Ring.create(num_ranks)
        self.replies = [Ring.create(1) for _ in range(num_ranks)]
        self.processes: list[WorkerProcess] = []
        self._store_fd = os.memfd_create("inferd-store")
        self._death_fd, self._death_pipe = os.pipe()
        self._closed = False
        try:
            for rank in range(num_ranks):
                self.processes.append(WorkerProcess(rank, self._spawn(config, rank, num_ranks, entry)))
        except BaseException:
            self.end(ask=False)
            self.close()
            raise

    def end(self, *, ask: bool) -> None:
        """Blocks until all have ended: given time when they were asked to (`ask`), then told, then forced."""
        if ask and self._wait_all(ASK_GRACE_S):
            return
        self._signal_all(signal.SIGTERM)
        if not self._wait_all(TERM_GRACE_S):
            self.kill()
            self._wait_all(None)

    def kill(self) -> None:
        """Also what is stopped ends by this. Does not wait."""
        self._signal_all(signal.SIGKILL)

    def close(self) -> None:
        """Idempotent; once all have ended and nobody uses the rings any more."""
        if self._closed:
            return
        self._closed = True
        for ring in (self.steps, *self.replies):
            ring.close()
        for process in self.processes:
            process.close()
        for fd in (self._store_fd, self._death_fd, self._death_pipe):
            os.close(fd)

    def _spawn(self, config: EngineConfig, rank: int, num_ranks: int, entry: str) -> subprocess.Popen[bytes]:
        start = WorkerStart(
            config=config,
            rank=rank,
            num_ranks=num_ranks,
            steps=self.steps.for_reader(rank),
            replies=self.replies[rank],
            store_fd=self._store_fd,
            death_fd=self._death_fd,
            parent_pid=os.getpid(),
            kernel_signal=threading.current_thread() is threading.main_thread(),
        )
        with os.fdopen(os.memfd_create("inferd-start"), "wb") as file:
            file.write(encode_start(start))
            file.flush()
            file.seek(0)  # the child reads on from here: a file's position is shared
            fds = (file.fileno(), *start.steps.fds, *start.replies.fds, self._store_fd, self._death_fd)
            return _popen(entry, file.fileno(), fds)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def _wait_all(self, timeout_s: float | None) -> bool:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for process in self.processes:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not process.wait(left_s):
                return False
        return True


def _popen(entry: str, start_fd: int, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    # -P keeps the working directory off the path: a folder `kernels` there would be taken for a package of that name.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", entry, "--start-fd", str(start_fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        process_group=0,  # a Ctrl-C at the terminal is for the parent, which then ends its workers in order
    )
