"""What helps others to understand a machine from afar, as one file: no keys, no prompts, no answers.

Every text passes the redactor on its way into the file, whatever it was made from.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import sqlite3
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib.metadata import distributions, version
from pathlib import Path

import msgspec

from inferd.appliance.described import described
from inferd.appliance.doctor.finding import Finding
from inferd.appliance.library.library import DATABASE_NAME
from inferd.appliance.schemas import LogLine
from inferd.appliance.settings import Settings

NUM_INCIDENTS = 50
COMMAND_TIMEOUT_S = 20.0
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "unit.txt": ("systemctl", "cat", "--no-pager", "inferd.service"),
    "unit-status.txt": ("systemctl", "status", "--no-pager", "--lines=0", "inferd.service"),
    "journal.txt": ("journalctl", "--unit=inferd.service", "--no-pager", "--lines=500", "--output=short-iso"),
    "nvidia-smi.txt": ("nvidia-smi",),
    "processor.txt": ("lscpu",),
    "memory.txt": ("free", "-b"),
    "disks.txt": ("df", "-k"),
}
Redact = Callable[[str], str]


def write_bundle(target: Path, members: Iterator[tuple[str, str]], redact: Redact) -> list[tuple[str, int]]:
    """Names and sizes of what was written. The file is new, and readable by its owner alone.

    Raises `FileExistsError` and other `OSError`.
    """
    written = []
    folder = target.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in members:
                content = redact(text).encode("utf-8", "replace")
                info = tarfile.TarInfo(f"{folder}/{name}")
                info.size, info.mtime, info.mode = len(content), int(time.time()), 0o600
                archive.addfile(info, io.BytesIO(content))
                written.append((name, len(content)))
    except BaseException:
        target.unlink()
        raise
    return written


def gather(settings: Settings, findings: Sequence[Finding], logs: Sequence[LogLine]) -> Iterator[tuple[str, str]]:
    """(name, text) of each member. What is not to be had on this machine is left out."""
    yield "about.json", _json({"inferd": version("inferd"), "python": platform.python_version(), **_system()})
    yield "doctor.json", _json(findings)
    rows = [{"name": name, "value": value, "origin": origin} for name, value, origin in described(settings)]
    yield "settings.json", _json(rows)
    yield from _of_database(settings.home / DATABASE_NAME)
    if logs:
        yield "log.jsonl", "\n".join(msgspec.json.encode(line).decode() for line in logs)
    names = sorted(f"{found.metadata['Name']}=={found.version}" for found in distributions())
    yield "packages.txt", "\n".join(names)
    for name, command in COMMANDS.items():
        if shutil.which(command[0]) and (text := _output(command)):
            yield name, text


def _of_database(path: Path) -> Iterator[tuple[str, str]]:
    """Models and incidents; never keys, options (a person's own templates are there) or usage."""
    queries = {
        "models.json": "SELECT id, source, format, architecture, size_bytes, quantisation, context_limit FROM models",
        "facts.json": "SELECT model_id, facts FROM model_facts",
        "migrations.json": "SELECT name, applied_at FROM migrations",
        "incidents.json": f"SELECT incident FROM incidents ORDER BY at DESC LIMIT {NUM_INCIDENTS}",
    }
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            for name, query in queries.items():
                yield name, _json([dict(row) for row in connection.execute(query)])
    except sqlite3.Error as error:
        yield "database-error.txt", str(error)


def _system() -> dict[str, str | int | None]:
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return done.stdout + done.stderr


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
