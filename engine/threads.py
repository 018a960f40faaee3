"""How threads of one matrix kernel wait for each other."""

from __future__ import annotations

import os

# Rounds that a thread spins at a barrier before it sleeps. GNU OpenMP's own choice is milliseconds long: as soon as any
# other program wants a core, threads spin for one that cannot run because they spin. Here that is 7 against 48 tokens
# per second; on an idle machine a small count costs a few per cent.
SPIN_COUNT = 300


def wait_briefly() -> None:
    """For a process of ours, before torch is imported: the runtime reads it once. A user's own setting stands."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
