"""What the disk is asked for: room before a write, and the promise that a write is there after a power cut."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inferd.appliance.library.errors import DiskFull

HEADROOM = 1.05  # of what is to be written: file systems need room for their own
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True)
class Disk:
    """The two calls that a full disk changes. `write(fd, data)` may write less than all, like `os.write`."""

    write: Callable[[int, memoryview], int] = os.write
    free_bytes: Callable[[Path], int] = _free_bytes

    def require(self, needed_bytes: int, folder: Path, what: str) -> None:
        """Raises `DiskFull` with both numbers unless 1.05 times `needed_bytes` are free."""
        free_bytes = self.free_bytes(folder)
        if needed_bytes * HEADROOM > free_bytes:
            raise DiskFull(
                f"{what} needs {format_bytes(int(needed_bytes * HEADROOM))}, but {folder} has "
                f"{format_bytes(free_bytes)} free; make room, or set another home"
            )

    def write_all(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.write(fd, rest) :]


@contextmanager
def full_disk_is_an_error_of_ours(folder: Path, what: str) -> Iterator[None]:
    """Turns "no space left", of a file or of the database, into `DiskFull`; every other error passes."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if not _says_no_room(error):
            raise
        raise DiskFull(
            f"the disk of {folder} became full while writing {what}; what was written so far stays and is used "
            "when you pull again"
        ) from error


def _says_no_room(error: OSError | sqlite3.OperationalError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return error.sqlite_errorcode == sqlite3.SQLITE_FULL


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Makes names in the folder durable: a rename is on disk only after this."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def format_bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
