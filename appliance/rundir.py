"""The folder of one daemon's sockets, and the clearing up after daemons that were killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferd.appliance.settings import SettingsError

PREFIX = "d-"
LOCK = "lock"


@contextmanager
def daemon_folder(run_dir: Path) -> Iterator[Path]:
    """A fresh folder of mode 0700 below `run_dir`, removed at the end. Raises `SettingsError`.

    Each folder holds a lock for as long as its daemon lives; one whose lock is free belonged to a killed daemon.
    """
    _make_private(run_dir)
    _sweep(run_dir)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=run_dir))
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make_private(run_dir: Path) -> None:
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = run_dir.lstat()
    except OSError as error:
        raise SettingsError(f"run_dir: {run_dir} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SettingsError(f"run_dir: {run_dir} is not a folder of this user; set INFERD_RUN_DIR to one that is")
    if stat.S_IMODE(found.st_mode) & 0o077:
        run_dir.chmod(0o700)


def _sweep(run_dir: Path) -> None:
    for path in run_dir.glob("*.sock"):
        if not _is_heard(path):
            path.unlink(missing_ok=True)
    for folder in run_dir.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # about to be locked by a daemon that starts right now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its daemon lives
        finally:
            os.close(lock)


def _is_heard(path: Path) -> bool:
    """Whether somebody listens at a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # somebody else's, or one that is too busy
            return True
    return True
