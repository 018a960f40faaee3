"""What the system says about main memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from inferd.appliance.memory.ledger import Reading

FRESH_S = 0.5
KEPT_FIELDS = ("RssAnon:", "RssShmem:")  # file pages can be taken back at any time


class HostProbe:
    """Main memory of this machine. A reading is good for half a second: the policy asks often."""

    def __init__(self) -> None:
        self._reading: Reading | None = None
        self._read_at = 0.0

    def read(self, pids: Iterable[int]) -> Reading:
        """`pids`: our engine processes, their children are counted with them."""
        if self._reading is None or time.monotonic() - self._read_at > FRESH_S:
            memory = psutil.virtual_memory()
            ours = sum(kept_bytes(pid) for root in pids for pid in family(root))
            self._reading, self._read_at = Reading(memory.total, memory.available, ours), time.monotonic()
        return self._reading


def family(pid: int) -> list[int]:
    """The process and its descendants; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


def kept_bytes(pid: int) -> int:
    """What the process holds that the system cannot take back; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(KEPT_FIELDS))
