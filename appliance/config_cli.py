"""The verbs of the configuration: `config`, `config path`, `config check FILE`. They parse, call and print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from inferd.appliance.cli_options import JsonOption
from inferd.appliance.described import described
from inferd.appliance.exits import with_exit_codes
from inferd.appliance.settings import check_file, config_files, load_settings, usual_files

config_app = typer.Typer(name="config", help="Show the settings and where each comes from; check a file.")


def register(app: typer.Typer) -> None:
    config_app.callback(invoke_without_command=True)(show)
    config_app.command("path")(with_exit_codes(path))
    config_app.command("check")(with_exit_codes(check))
    app.add_typer(config_app)


def show(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help="This file instead of the usual inferd.toml.")] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not as built in.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Every setting: its value, and who gave it (default, a file, a variable of the environment)."""
    if context.invoked_subcommand is None:
        with_exit_codes(_show)(config, changed, as_json)


def _show(config: Path | None, changed: bool, as_json: bool) -> None:
    rows = [row for row in described(load_settings(config=config)) if not (changed and row[2] == "default")]
    if as_json:
        typer.echo(json.dumps([{"name": name, "value": value, "origin": origin} for name, value, origin in rows]))
        return
    names, values = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    for name, value, origin in rows:
        typer.echo(f"{name:<{names}}  {value:<{values}}  {origin}")


def path(as_json: JsonOption = False) -> None:
    """The files that are read, weakest first, and where one may be put."""
    read = config_files()
    places = [*read, *(place for place in usual_files() if place not in read)]
    if as_json:
        typer.echo(json.dumps([{"path": str(place), "is_read": place in read} for place in places]))
        return
    for place in places:
        typer.echo(f"{place}  {'is read' if place in read else 'is not read' if place.exists() else 'does not exist'}")


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An inferd.toml, before it is put in place.")],
    as_json: JsonOption = False,
) -> None:
    """Say whether a file can be used; exit code 78 when it cannot."""
    check_file(file)
    typer.echo(json.dumps({"path": str(file), "ok": True}) if as_json else f"{file} can be used")
