"""What goes on during a pull and a start, for people: one bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from inferd.appliance.downloads.disk import format_bytes
from inferd.appliance.downloads.progress import PullProgress
from inferd.appliance.log import write_to_stderr

LINE_PERCENT = 10


class Display(Protocol):
    """Called from any thread. After `close` it shows nothing any more but what is written."""

    def __call__(self, progress: PullProgress) -> None: ...

    def stage(self, text: str) -> None:
        """Something that has no bytes to count goes on now."""
        ...

    def write(self, line: str) -> None:
        """A line of its own, as of the log: what else is shown does not run into it."""
        ...

    def close(self) -> None: ...


def display_on_stderr() -> Display:
    return BarDisplay() if sys.stderr.isatty() else LineDisplay()


class LineDisplay:
    """For logs: one line a phase and file, and one for every ten percent."""

    def __init__(self, write: Callable[[str], None] = write_to_stderr) -> None:
        self._write = write
        self._last: tuple[str, str, int] | None = None

    def __call__(self, progress: PullProgress) -> None:
        percent = 100 * progress.bytes_done // progress.bytes_total if progress.bytes_total else 0
        now = (progress.phase, progress.file, percent // LINE_PERCENT)
        if now == self._last:
            return
        self._last = now
        amount = f" {percent} % of {format_bytes(progress.bytes_total)}" if progress.bytes_total else ""
        self._write(f"{progress.phase} {progress.file}{amount}")

    def stage(self, text: str) -> None:
        self._write(text)

    def write(self, line: str) -> None:
        self._write(line)

    def close(self) -> None:
        """Nothing is left open by a line."""


class BarDisplay:
    """One bar on stderr, of whatever goes on now; it is there from the first report until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._shown: tuple[TaskID, str] | None = None
        self._closed = False

    def __call__(self, progress: PullProgress) -> None:
        self._show(f"{progress.phase} {progress.file}", progress.bytes_done, progress.bytes_total)

    def stage(self, text: str) -> None:
        self._show(text, 0, None)

    def write(self, line: str) -> None:
        with self._lock:
            if self._bar is None:
                write_to_stderr(line)
            else:
                self._bar.console.print(Text(line, overflow="fold"))  # above the bar, which is drawn again below

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _show(self, text: str, done: int, total: int | None) -> None:
        with self._lock:
            if self._closed:
                return
            if self._bar is None:
                self._bar = _new_bar(self._console)
                self._bar.start()
            if self._shown is None or self._shown[1] != text:
                if self._shown is not None:
                    self._bar.remove_task(self._shown[0])
                self._shown = self._bar.add_task(text, total=total), text
            self._bar.update(self._shown[0], completed=done, total=total)


def _new_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=2)),
        BarColumn(),
        _OfBytes(DownloadColumn(binary_units=True)),
        _OfBytes(TransferSpeedColumn()),
        _OfBytes(TimeRemainingColumn()),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        expand=True,
    )


class _OfBytes(ProgressColumn):
    """Empty while there are no bytes to count."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> Text:
        rendered = self._column.render(task) if task.total is not None else Text("")
        assert isinstance(rendered, Text)
        return rendered
