"""Time as an engine tells it: seconds since the epoch that never go back or jump, so that they can be subtracted.

It runs on through a suspended machine. What is learnt of the true time after the start is not taken into account.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

_started_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_time() -> float:
    return _started_at + time.clock_gettime(time.CLOCK_BOOTTIME)
