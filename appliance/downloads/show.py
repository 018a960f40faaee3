"""A pull's progress for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from inferd.appliance.downloads.disk import format_bytes
from inferd.appliance.downloads.progress import PullProgress, Report

LINE_PERCENT = 10


class LineProgress:
    """For logs: one line a phase and file, and one for every ten percent."""

    def __init__(self, write: Callable[[str], None]) -> None:
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


@contextmanager
def bar_progress() -> Iterator[Report]:
    """For a terminal: one bar on stderr, of whatever goes on now."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("resolving", total=None)
        shown = ("", "")

        def report(progress: PullProgress) -> None:
            nonlocal shown
            if shown != (progress.phase, progress.file):
                shown = (progress.phase, progress.file)
                bar.reset(task, description=f"{progress.phase} {progress.file}", total=progress.bytes_total)
            bar.update(task, completed=progress.bytes_done, total=progress.bytes_total)

        yield report
