"""The command line: verbs parse, call and print. Exit codes are those of `exits.exit_code_of`."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer

from inferd.appliance import admin_cli, config_cli, doctor_cli, library_cli
from inferd.appliance.chat_cli import ChatOptions, chat_once, chat_with_person
from inferd.appliance.cli_options import HostOption, JsonOption, PortOption
from inferd.appliance.client import Client
from inferd.appliance.exits import with_exit_codes
from inferd.appliance.library.errors import EmptyLibrary
from inferd.appliance.live import LiveSettings
from inferd.appliance.settings import SettingsError, load_settings

app = typer.Typer(
    name="inferd",
    help="An inference appliance: a model library, an engine and the OpenAI API, on this machine.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="This file instead of the usual inferd.toml.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as in engine.dtype=float32.")
]


def main() -> None:
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"inferd {installed_version('inferd')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """What stands before a verb."""


@app.command()
@with_exit_codes
def serve(
    model: Annotated[
        str | None, typer.Option(help="What to load: a name of the library, a model folder, or a source to pull.")
    ] = None,
    host: HostOption = None,
    port: PortOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log more, as what the engine decided by itself and why.")
    ] = False,
) -> None:
    """Serve the OpenAI API on this machine; the first start pulls a small model."""
    from inferd.appliance.serve_cli import serve_here

    given = {"model": model, "host": host, "port": port, "log_level": "debug" if verbose else None}
    flags = _assignments(sets) | {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(serve_here(LiveSettings(load_settings(flags, config), lambda: load_settings(flags, config))))


@app.command()
@with_exit_codes
def run(
    model: Annotated[str | None, typer.Argument(help="A model's name; left out: the loaded one.")] = None,
    prompt: Annotated[str | None, typer.Argument(help="One question; left out: a conversation.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before everything else.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: always the likeliest token; left out: what the model's authors recommend.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that have this much in sum.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="The longest answer; left out: what the context holds.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed and question give the same answer.")] = None,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Chat with a model of the running daemon; Ctrl-C stops an answer, Ctrl-D ends."""
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    options = ChatOptions(system, {name: value for name, value in given.items() if value is not None})
    settings = load_settings({"host": host, "port": port})
    with Client(settings.address, settings.admin_socket) as client:
        known = client.model_ids()
        if prompt is None and model is not None and model not in known and " " in model:
            model, prompt = None, model  # a question alone
        if model is None and not known:
            raise EmptyLibrary
        chosen = model or known[0]
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read()
        if prompt is None:
            client.check_model(chosen)  # before anybody types a question
            chat_with_person(client, chosen, options)
        elif prompt.strip():
            chat_once(client, chosen, prompt, options)
        else:
            raise typer.BadParameter("the question is empty")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    short_help="Measure the engine; `inferd bench --help` has its options.",
)
@with_exit_codes
def bench(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="A name of the library, or a model folder.")] = None,
) -> None:
    command = [sys.executable, "-P", "-m", "inferd.engine.bench", *context.args]
    if not {"--help", "-h", "gpu", "--suite=gpu"} & set(context.args):  # the GPU suite makes its own model
        command += ["--model", str(library_cli.model_folder(model))]
    os.execv(sys.executable, command)


@app.command()
def version(as_json: JsonOption = False) -> None:
    """Print the version."""
    number = installed_version("inferd")
    typer.echo(json.dumps({"name": "inferd", "version": number}) if as_json else f"inferd {number}")


def _assignments(texts: list[str] | None) -> dict[str, Any]:
    """`engine.dtype=float32` → nested tables. Values are TOML, or text where they are not."""
    tables: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"--set {text}: write KEY=VALUE")
        *path, name = key.strip().split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise SettingsError(f"--set {text}: {part} was given a value before, it cannot be a table as well")
        try:
            table[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            table[name] = value
    return tables


library_cli.register(app)
admin_cli.register(app)
config_cli.register(app)
doctor_cli.register(app)
