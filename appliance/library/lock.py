"""One process at a time changes the models of a home."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferd.appliance.library.errors import HomeServed, LibraryBusy

LOCK_NAME = "library.lock"
SERVICE_NAME = "daemon.lock"  # each daemon of this home has it, together


class LibraryLock:
    """Held by the process while at least one of its threads is inside `held`. It dies with the process."""

    def __init__(self, home: Path) -> None:
        self._path = home / LOCK_NAME
        self._mutex = threading.Lock()
        self._num_holders = 0
        self._fd = -1

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Yields whether this call took the lock, so that nobody else in this process is inside.

        Raises `LibraryBusy`, which names the other process.
        """
        with self._mutex:
            first = self._num_holders == 0
            if first:
                self._fd = _take(self._path)
            self._num_holders += 1
        try:
            yield first
        finally:
            with self._mutex:
                self._num_holders -= 1
                if self._num_holders == 0:
                    os.close(self._fd)


@contextmanager
def in_service(home: Path) -> Iterator[None]:
    """For as long as a daemon serves models of this home. Waits for a process inside `out_of_service`."""
    with _locked(home / SERVICE_NAME, fcntl.LOCK_SH):
        yield


@contextmanager
def out_of_service(home: Path) -> Iterator[None]:
    """While something is taken away that a daemon may be using. Raises `HomeServed`."""
    try:
        with _locked(home / SERVICE_NAME, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield
    except BlockingIOError:
        raise HomeServed(home) from None


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


def _take(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        text = os.pread(fd, 20, 0)
        os.close(fd)
        raise LibraryBusy(int(text) if text.isdigit() else None) from None
    except BaseException:
        os.close(fd)
        raise
    return fd
