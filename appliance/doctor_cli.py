"""`inferd doctor` and `inferd support-bundle`: they parse, look, judge and print."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from inferd.appliance.admin_client import ActFailed, AdminClient, NotAllowed, Unreachable
from inferd.appliance.cli_options import JsonOption
from inferd.appliance.doctor.bundle import gather, write_bundle
from inferd.appliance.doctor.examine import examine, read_facts
from inferd.appliance.doctor.finding import Finding, failure
from inferd.appliance.doctor.redact import make_redactor
from inferd.appliance.downloads.disk import format_bytes
from inferd.appliance.events.messages import Snapshot
from inferd.appliance.exits import with_exit_codes
from inferd.appliance.schemas import LogLine
from inferd.appliance.settings import Settings, SettingsError, load_settings

MARKS = {"ok": "ok", "warning": "WARN", "failure": "FAIL"}  # words, for those who see no colours
COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}
LOGS_WITHIN_S = 5.0
ConfigOption = Annotated[Path | None, typer.Option("--config", help="This file instead of the usual inferd.toml.")]


def register(app: typer.Typer) -> None:
    app.command("doctor")(with_exit_codes(doctor))
    app.command("support-bundle")(with_exit_codes(support_bundle))


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Look for what keeps this machine from serving; exit code 1 when something does."""
    _, findings = _look(config)
    if as_json:
        typer.echo(msgspec.json.encode(findings))
    else:
        for line in _report(findings):
            typer.echo(line)
    if any(finding.status == "failure" for finding in findings):
        raise typer.Exit(1)


def support_bundle(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="A new file; only you can read it.")],
    config: ConfigOption = None,
) -> None:
    """Write a file that helps others to see what is wrong: no keys, no prompts, no answers."""
    settings, findings = _look(config)
    if settings is None:
        settings = Settings.model_construct()
    logs = asyncio.run(_logs(settings))
    written = write_bundle(file, gather(settings, findings, logs), make_redactor(os.environ))
    for name, size in written:
        typer.echo(f"{format_bytes(size):>10}  {name}")
    typer.echo(
        f"{file} is written. Keys, passwords and the name of your home folder are taken out; look before you send it."
    )


def _look(config: Path | None) -> tuple[Settings | None, list[Finding]]:
    try:
        settings = load_settings(config=config)
    except SettingsError as error:
        remedy = "Mend what is named, `inferd config check FILE` says when it is right; the other checks wait for it."
        return None, [failure("settings", str(error), remedy)]
    return settings, examine(read_facts(settings, os.environ))


def _report(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        mark = typer.style(f"{MARKS[finding.status]:<4}", fg=COLOURS[finding.status])
        lines.append(f"{mark}  {finding.check:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"      {'':<{width}}  → {finding.remedy}")
    counts = [sum(finding.status == status for finding in findings) for status in ("failure", "warning")]
    lines.append(f"{counts[0]} failed, {counts[1]} to be looked at, {len(findings) - sum(counts)} fine")
    return lines


async def _logs(settings: Settings) -> list[LogLine]:
    """The newest lines of a running daemon; none where there is none, or one that does not let us look."""
    try:
        async with (
            asyncio.timeout(LOGS_WITHIN_S),
            AdminClient(settings.address, socket=settings.admin_socket) as client,
            aclosing(client.events(["logs"])) as events,
        ):
            async for _, event in events:
                if isinstance(event, Snapshot):
                    return [msgspec.convert(fields, LogLine) for fields in event.journals.get("logs", [])]
    except (Unreachable, NotAllowed, ActFailed, TimeoutError):
        pass
    return []
