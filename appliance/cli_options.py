"""Options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

HostOption = Annotated[str | None, typer.Option(help="Address of the daemon.")]
PortOption = Annotated[int | None, typer.Option(help="Port of the daemon.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]
