"""A child process that cannot outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

PR_SET_PDEATHSIG = 1
EXIT_PARENT_DIED = 3


def die_with_parent(death_fd: int, parent_pid: int, *, kernel_signal: bool) -> None:
    """Ends this process once the parent is gone: when the pipe behind `death_fd` closes, or by the kernel.

    The kernel's signal follows the parent's *thread*, so it is asked for only when that was the main thread. The pipe
    follows the process, but its watcher has to get a turn among this process's threads: so both.
    """
    if kernel_signal:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the request above
        os._exit(EXIT_PARENT_DIED)
    threading.Thread(target=_exit_at_end_of, args=(death_fd,), name="parent-watch", daemon=True).start()


def _exit_at_end_of(death_fd: int) -> None:
    while os.read(death_fd, 1):
        pass
    os._exit(EXIT_PARENT_DIED)
