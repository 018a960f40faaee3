"""Starts an engine process, watches it, and takes away what it leaves behind."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from inferd.engine.config import EngineArgs
from inferd.engine.core.lines import LogRelay, child_level
from inferd.engine.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 107  # sun_path of a unix socket, without its closing zero
NUM_LAST_LINES = 30
TERM_GRACE_S = 2.0

OnLine = Callable[[str], None]


class StartFile(msgspec.Struct, forbid_unknown_fields=True):
    """All that an engine process is told at its start; JSON of mode 0600."""

    args: EngineArgs
    input_socket: str  # to be bound by the engine
    output_socket: str  # bound by the front
    death_fd: int  # the read end of a pipe whose other end only the parent has
    parent_pid: int
    kernel_signal: bool  # the parent's main thread started it, see `die_with_parent`
    log_level: str = "INFO"


@dataclass(frozen=True)
class EnginePaths:
    """The private folder (mode 0700) of one engine: what it starts from, and its sockets."""

    folder: Path

    @classmethod
    def make(cls, run_dir: Path) -> EnginePaths:
        """Raises `ConfigError` when `run_dir` is too long for a unix socket or cannot be written."""
        try:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = cls(Path(tempfile.mkdtemp(prefix="e-", dir=run_dir)))
        except OSError as error:
            raise ConfigError(f"the run directory {run_dir} cannot be used: {error}") from error
        length = len(os.fsencode(paths.output_socket))
        if length > MAX_SOCKET_PATH_BYTES:
            paths.folder.rmdir()
            raise ConfigError(
                f"the run directory {run_dir} is too long: a unix socket in it would have a path of {length} bytes, "
                f"and {MAX_SOCKET_PATH_BYTES} are allowed; choose a shorter one"
            )
        return paths

    @property
    def input_socket(self) -> Path:
        return self.folder / "in"

    @property
    def output_socket(self) -> Path:
        return self.folder / "out"

    @property
    def start_file(self) -> Path:
        return self.folder / "start.json"

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineProcess:
    """One child. It ends when this process does; spawn it from the main thread so that the kernel sees to that too.

    `exit_fd` becomes readable (end of file) when the child has ended, for pollers and event loops. `on_line` gets each
    line of its output, on a thread of its own.
    """

    def __init__(self, args: EngineArgs, paths: EnginePaths, on_line: OnLine | None = None) -> None:
        self.paths = paths
        self._lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._on_line = on_line or LogRelay()
        death_fd, self._death_pipe = os.pipe()
        self.exit_fd, self._exit_write_fd = os.pipe()
        try:
            _write_start_file(args, paths, death_fd)
            self._popen = _popen(paths, death_fd)
        except BaseException:
            for fd in (self._death_pipe, self.exit_fd, self._exit_write_fd):
                os.close(fd)
            raise
        finally:
            os.close(death_fd)
        self._exited = threading.Event()
        self._reader = threading.Thread(target=self._read_lines, name="engine-lines", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name="engine-exit", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal when one ended it."""
        return self._popen.returncode if self._exited.is_set() else None

    @property
    def last_lines(self) -> list[str]:
        return list(self._lines)

    def describe_exit(self) -> str:
        """How it ended and its last lines, for an error message."""
        code = self.exit_code
        if code is None:
            how = "is still running"
        elif code < 0:
            names = {int(known): known.name for known in signal.Signals}
            how = f"was ended by {names.get(-code, f'signal {-code}')}"
        else:
            how = f"ended with exit code {code}"
        self._reader.join(0.2 if code is not None else 0.0)  # the last lines may still be in the pipe
        last = "\n".join(self.last_lines)
        return f"the engine process {self.pid} {how}" + (f"; its last lines:\n{last}" if last else "")

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code; None when it still runs after `timeout_s`."""
        self._exited.wait(timeout_s)
        return self.exit_code

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        """Ends it if need be (asked, then forced), and removes its folder. Idempotent; blocks for seconds at most."""
        if self._death_pipe < 0:
            return
        if self.exit_code is None:
            self.terminate()
            if self.wait(TERM_GRACE_S) is None:
                self.kill()
        self._waiter.join()
        self._reader.join(1.0)
        os.close(self._death_pipe)
        os.close(self.exit_fd)
        self._death_pipe = -1
        self.paths.remove()

    def _read_lines(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as stream:
            for line in map(str.rstrip, stream):
                self._lines.append(line)
                try:
                    self._on_line(line)
                except Exception:  # an engine whose output nobody reads would stop at its next line
                    logger.exception("a line of the engine could not be passed on: %s", line)

    def _wait(self) -> None:
        self._popen.wait()
        self._exited.set()
        os.close(self._exit_write_fd)


def _write_start_file(args: EngineArgs, paths: EnginePaths, death_fd: int) -> None:
    start = StartFile(
        args=args,
        input_socket=str(paths.input_socket),
        output_socket=str(paths.output_socket),
        death_fd=death_fd,
        parent_pid=os.getpid(),
        kernel_signal=threading.current_thread() is threading.main_thread(),
        log_level=child_level(),
    )
    fd = os.open(paths.start_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(start))


def _popen(paths: EnginePaths, death_fd: int) -> subprocess.Popen[str]:
    script = Path(sys.executable).with_name("inferd-engine")
    # -P keeps the working directory off the path: a folder `kernels` there would be taken for a package of that name.
    program = [str(script)] if script.exists() else [sys.executable, "-P", "-m", "inferd.engine.serve"]
    return subprocess.Popen(
        [*program, "--start-file", str(paths.start_file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(death_fd,),
        umask=0o077,
        process_group=0,  # a Ctrl-C at the terminal is for the parent, which then ends this one in order
        text=True,
        encoding="utf-8",
        errors="replace",
    )
