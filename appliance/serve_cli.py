"""`inferd serve` at a terminal: progress of the first pull, then what to copy."""

from __future__ import annotations

import shutil
import sys
import threading
from contextlib import ExitStack

import typer

from inferd.appliance.downloads.progress import PullProgress, Report
from inferd.appliance.downloads.show import LineProgress, bar_progress
from inferd.appliance.log import set_up_logging
from inferd.appliance.main import Reports, Started, run_daemon
from inferd.appliance.settings import Settings

DEFAULT_PORT = Settings.model_fields["port"].default
QUESTION = "What is the capital of France?"


def serve_here(settings: Settings) -> int:
    """Serves until a signal; returns the exit code."""
    set_up_logging(settings.log_level)
    with _PullDisplay() as display:

        def ready(started: Started) -> None:
            display.close()
            typer.echo(greeting(started, settings.port))

        return run_daemon(settings, Reports(pull=display, ready=ready))


def greeting(started: Started, port: int) -> str:
    body = f'{{"model": "{started.model}", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'
    url = f"{started.address}/v1"
    python = (
        f"from openai import OpenAI; print(OpenAI(base_url='{url}', api_key='-').chat.completions.create("
        f"model='{started.model}', messages=[{{'role': 'user', 'content': '{QUESTION}'}}])"
        ".choices[0].message.content)"
    )
    where = "" if port == DEFAULT_PORT else f"--port {started.address.rpartition(':')[2]} "
    return "\n".join(
        (
            f"\ninferd serves {started.model} at {url} (loaded in {started.load_s:.1f} s). Ask it:\n",
            f"  curl {url}/chat/completions -H 'content-type: application/json' -d '{body}'",
            f'  python -c "{python}"',
            f'  {_command()} run {where}{started.model} "{QUESTION}"\n',
        )
    )


def _command() -> str:
    """How this shell finds us: a virtual environment that is not active is on no path."""
    return "inferd" if shutil.which("inferd") else sys.argv[0]


class _PullDisplay:
    """A bar on a terminal, lines elsewhere; opened by the first report, which comes from the pull's thread."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._report: Report | None = None
        if not sys.stderr.isatty():
            self._report = LineProgress(lambda line: typer.echo(line, err=True))

    def __enter__(self) -> _PullDisplay:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __call__(self, progress: PullProgress) -> None:
        with self._lock:
            if self._report is None:
                self._report = self._stack.enter_context(bar_progress())
            self._report(progress)

    def close(self) -> None:
        with self._lock:
            self._stack.close()
