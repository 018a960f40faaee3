"""The service around the daemon: what killed ones have left, and whether the unit is the one that was installed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from inferd.appliance.doctor.finding import Finding, fine, warning
from inferd.appliance.rundir import LOCK, PREFIX

UNIT = "inferd.service"
# Strongest first, as systemd looks for units.
SYSTEM_UNITS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)


@dataclass(frozen=True)
class ServiceFacts:
    leftovers: tuple[Path, ...] = ()  # folders of daemons that live no more
    units: tuple[Path, ...] = ()  # of that name, strongest first
    drop_ins: tuple[Path, ...] = ()


def check_service(facts: ServiceFacts) -> Iterator[Finding]:
    if facts.leftovers:
        names = ", ".join(str(path) for path in facts.leftovers)
        remedy = "The next start of the daemon takes them away; `inferd incidents` may say why it was killed."
        yield warning("leftovers", f"a daemon was killed and left {names}", remedy)
    else:
        yield fine("leftovers", "none")
    yield _unit(facts)


def _unit(facts: ServiceFacts) -> Finding:
    if len(facts.units) > 1:
        text = f"{facts.units[0]} hides {', '.join(map(str, facts.units[1:]))}"
        remedy = f"Move your changes into a drop-in (`systemctl edit {UNIT}`) and remove {facts.units[0]}."
        return warning("unit", text, remedy)
    if facts.drop_ins:
        text = f"changed by {', '.join(map(str, facts.drop_ins))}"
        return warning("unit", text, f"If that is not meant: `systemctl revert {UNIT}`.")
    return fine("unit", str(facts.units[0]) if facts.units else "not installed as a service")


def read_service(run_dir: Path, config_home: Path, root: Path = Path("/")) -> ServiceFacts:
    folders = [root / folder.lstrip("/") for folder in SYSTEM_UNITS]
    for places in (folders, [config_home / "systemd/user"]):
        units = tuple(path for folder in places if (path := folder / UNIT).exists())
        if units:
            return ServiceFacts(tuple(_leftovers(run_dir)), units, tuple(_drop_ins(places)))
    return ServiceFacts(tuple(_leftovers(run_dir)))


def _drop_ins(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((folder / f"{UNIT}.d").glob("*.conf"))


def _leftovers(run_dir: Path) -> Iterator[Path]:
    """Each living daemon holds the lock of its folder."""
    try:
        folders = sorted(run_dir.glob(f"{PREFIX}*"))
    except PermissionError:
        return
    for folder in folders:
        try:
            fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # about to be locked, or not ours to look at
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
