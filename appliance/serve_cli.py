"""`inferd serve` at a terminal: what goes on until it serves, then what to copy."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from pathlib import Path

import typer

from inferd.appliance.auth.first_key import FILE_NAME
from inferd.appliance.downloads.show import display_on_stderr
from inferd.appliance.live import LiveSettings
from inferd.appliance.log import set_level, set_up_logging
from inferd.appliance.main import Reports, Started, run_daemon
from inferd.appliance.settings import Settings

DEFAULT_PORT = Settings.model_fields["port"].default
QUESTION = "What is the capital of France?"


def serve_here(live: LiveSettings) -> int:
    """Serves until a signal; returns the exit code."""
    with closing(display_on_stderr()) as display:
        set_up_logging(live.current.log_level, display.write)
        live.on_change(lambda: set_level(live.current.log_level))

        def starting(model: str) -> None:
            display.stage(f"starting the engine of {model}")

        def ready(started: Started) -> None:
            display.close()
            typer.echo(greeting(started, live.current.port))
            if started.admin_key is not None:
                typer.echo(first_key_note(started.admin_key, live.current.home / FILE_NAME))

        return run_daemon(live, Reports(pull=display, starting=starting, ready=ready))


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
            f"\ninferd is ready: it serves {started.model} at {url} (loaded in {started.load_s:.1f} s). Ask it:\n",
            f"  curl {url}/chat/completions -H 'content-type: application/json' -d '{body}'",
            f'  python -c "{python}"  # pip install openai',
            f'  {_command()} run {where}{started.model} "{QUESTION}"\n',
            f"See what it does: `{_command()} top` here, {started.address}/console in a browser.\n",
        )
    )


def first_key_note(key: str, file: Path) -> str:
    return (
        f"Administering it from a browser or another machine needs this key, shown this once: {key}\n"
        f"(it also stands in {file})\n"
    )


def _command() -> str:
    """How this shell finds us: a virtual environment that is not active is on no path."""
    return "inferd" if shutil.which("inferd") else sys.argv[0]
