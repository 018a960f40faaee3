"""The folders that are written to: every step of the way to them, who may enter, and what may be run from there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inferd.appliance.doctor.finding import Finding, failure, fine

MAX_SOCKET_PATH_BYTES = 107  # sun_path of a unix socket, without its closing zero
SOCKET_TAIL = "d-12345678/e-12345678/out"  # what a daemon and an engine put below run_dir


@dataclass(frozen=True)
class Step:
    """One folder on the way, or the goal itself."""

    path: Path
    mode: int
    may_enter: bool = True
    may_write: bool = True
    is_folder: bool = True


@dataclass(frozen=True)
class Place:
    """`steps` are those that exist, from "/" on."""

    name: str
    path: Path
    steps: tuple[Step, ...]
    is_private: bool = True  # others may not look into it
    must_run: bool = False  # what is compiled is loaded from there
    no_exec: bool = False

    @property
    def exists(self) -> bool:
        return bool(self.steps) and self.steps[-1].path == self.path


@dataclass(frozen=True)
class PlaceFacts:
    places: tuple[Place, ...] = ()
    run_dir: Path = Path("/run/inferd")
    open_secrets: tuple[Path, ...] = ()  # that others may read


def check_places(facts: PlaceFacts) -> Iterator[Finding]:
    for place in facts.places:
        yield _way(place)
    yield _sockets(facts.run_dir)
    if facts.open_secrets:
        names = " ".join(str(path) for path in facts.open_secrets)
        yield failure("secrets", f"other users may read {names}", f"Close them: `chmod 600 {names}`.")
    else:
        yield fine("secrets", "readable by their owner alone")


def _way(place: Place) -> Finding:
    name = f"permissions of {place.name}"
    for step in place.steps:
        if not step.is_folder:
            return failure(name, f"{step.path} is no folder", f"Move it away, or set another {place.name}.")
        if not step.may_enter:
            remedy = f"Let this user through with `chmod o+x {step.path}`, or set another {place.name}."
            return failure(name, f"this user may not enter {step.path}, on the way to {place.path}", remedy)
        if step.mode & stat.S_IWOTH and not step.mode & stat.S_ISVTX:
            text = f"anybody may write to {step.path}, and so replace {place.path}"
            return failure(name, text, f"Close it: `chmod o-w {step.path}`.")
    last = place.steps[-1] if place.steps else None
    if last is None or not last.may_write:
        where = last.path if last is not None else place.path
        remedy = f"Give it to this user with `chown`, or set another {place.name}."
        return failure(name, f"this user may not write to {where}", remedy)
    if place.is_private and place.exists and last.mode & 0o077:
        text = f"other users may look into {place.path} (mode {stat.S_IMODE(last.mode):03o})"
        return failure(name, text, f"Close it: `chmod 700 {place.path}`.")
    if place.must_run and place.no_exec:
        remedy = "Mount it without noexec, or set XDG_CACHE_HOME to a folder elsewhere."
        return failure(name, f"{place.path} is mounted noexec: compiled kernels cannot be loaded from it", remedy)
    return fine(name, str(place.path) if place.exists else f"{place.path} will be made")


def _sockets(run_dir: Path) -> Finding:
    longest = len(os.fsencode(run_dir / SOCKET_TAIL))
    if longest > MAX_SOCKET_PATH_BYTES:
        text = f"a socket below {run_dir} has {longest} bytes in its path, and {MAX_SOCKET_PATH_BYTES} are allowed"
        return failure("socket paths", text, "Set run_dir (INFERD_RUN_DIR) to a shorter path.")
    return fine("socket paths", f"{longest} of {MAX_SOCKET_PATH_BYTES} bytes at the most")


def read_places(home: Path, run_dir: Path, cache: Path) -> PlaceFacts:
    is_entered = bool(_mode(home) & 0o011)  # by others than its owner
    secrets = [home / "admin.key", *([home / "library.db"] if is_entered else [])]
    return PlaceFacts(
        places=(
            read_place("home", home),
            read_place("run_dir", run_dir),
            read_place("cache", cache, is_private=False, must_run=True),
        ),
        run_dir=run_dir,
        open_secrets=tuple(path for path in secrets if _mode(path) & 0o077),
    )


def read_place(name: str, path: Path, *, is_private: bool = True, must_run: bool = False) -> Place:
    steps = [step for part in [*reversed(path.parents), path] if (step := _step(part)) is not None]
    no_exec = must_run and bool(steps) and bool(os.statvfs(steps[-1].path).f_flag & os.ST_NOEXEC)
    return Place(name, path, tuple(steps), is_private=is_private, must_run=must_run, no_exec=no_exec)


def _step(path: Path) -> Step | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:  # the step before says it
        return None
    return Step(
        path, found.st_mode, os.access(path, os.X_OK), os.access(path, os.W_OK | os.X_OK), stat.S_ISDIR(found.st_mode)
    )


def _mode(path: Path) -> int:
    """0 for what is not there, or cannot be looked at."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0
