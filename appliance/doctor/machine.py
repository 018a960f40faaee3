"""Disk, memory, shared memory and the clock."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from inferd.appliance.doctor.finding import Finding, failure, fine, warning
from inferd.appliance.downloads.disk import format_bytes

GIB = 2**30
DISK_GONE, DISK_LOW = GIB, 10 * GIB
MEMORY_GONE = GIB
SHARED_MEMORY = GIB  # what several cards exchange data through
CLOCK_SLACK_S = 24 * 3600.0
LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class MachineFacts:
    home: Path = Path("/")
    disk_free_bytes: int = 0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    memory_limit_bytes: int | None = None  # of the container or unit around us
    memory_budget_bytes: int | None = None
    shared_memory_bytes: int | None = None  # of /dev/shm; None: there is none
    num_ranks: int = 1  # the most that one model is divided over
    now: float = 0.0
    not_before: float = 0.0  # when something was written that is here


def check_machine(facts: MachineFacts) -> Iterator[Finding]:
    yield _disk(facts)
    yield _memory(facts)
    yield _shared_memory(facts)
    yield _clock(facts)


def _disk(facts: MachineFacts) -> Finding:
    text = f"{format_bytes(facts.disk_free_bytes)} free for {facts.home}"
    remedy = "Make room, take away models with `inferd rm`, or set home to a larger disk."
    if facts.disk_free_bytes < DISK_GONE:
        return failure("disk", text, remedy)
    if facts.disk_free_bytes < DISK_LOW:
        return warning("disk", text, remedy)
    return fine("disk", text)


def _memory(facts: MachineFacts) -> Finding:
    total = min(facts.memory_total_bytes, facts.memory_limit_bytes or facts.memory_total_bytes)
    text = f"{format_bytes(facts.memory_available_bytes)} of {format_bytes(total)} available"
    if facts.memory_budget_bytes is not None and facts.memory_budget_bytes > total:
        text = f"memory_budget_bytes is {format_bytes(facts.memory_budget_bytes)}, and there are {format_bytes(total)}"
        return failure("memory", text, "Set memory_budget_bytes to less than there is, or raise the limit around it.")
    if facts.memory_available_bytes < MEMORY_GONE:
        return failure("memory", text, "End other programs, unload models with `inferd unload`, or add memory.")
    return fine("memory", text)


def _shared_memory(facts: MachineFacts) -> Finding:
    name, size = "shared memory", facts.shared_memory_bytes
    if facts.num_ranks <= 1:
        return fine(name, "not needed: no model is divided over several cards")
    if size is None or size < SHARED_MEMORY:
        text = f"/dev/shm has {format_bytes(size or 0)}, and {facts.num_ranks} cards exchange data through it"
        remedy = "Mount it larger: `mount -o remount,size=8G /dev/shm`; for a container, --shm-size=8g."
        return failure(name, text, remedy)
    return fine(name, f"{format_bytes(size)} in /dev/shm")


def _clock(facts: MachineFacts) -> Finding:
    shown = datetime.fromtimestamp(facts.now, UTC).strftime("%Y-%m-%d %H:%M UTC")
    if facts.now < facts.not_before - CLOCK_SLACK_S:
        earlier = datetime.fromtimestamp(facts.not_before, UTC).strftime("%Y-%m-%d")
        text = f"it says {shown}, but files here were written on {earlier}: keys, certificates and quotas go by it"
        return failure("clock", text, "Set it, and keep it right: `timedatectl set-ntp true`.")
    return fine("clock", shown)


def read_machine(home: Path, *, memory_budget_bytes: int | None, num_ranks: int) -> MachineFacts:
    memory = psutil.virtual_memory()
    shm = Path("/dev/shm")
    return MachineFacts(
        home=home,
        disk_free_bytes=shutil.disk_usage(_existing(home)).free,
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=_limit(),
        memory_budget_bytes=memory_budget_bytes,
        shared_memory_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        num_ranks=num_ranks,
        now=time.time(),
        not_before=max(path.stat().st_mtime for path in (Path(__file__), home / "library.db") if path.is_file()),
    )


def _existing(path: Path) -> Path:
    """The nearest folder that is there and can be looked at."""
    for candidate in (path, *path.parents):
        try:
            if candidate.is_dir():
                return candidate
        except PermissionError:
            continue
    return Path("/")


def _limit() -> int | None:
    for path in LIMIT_FILES:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None
