"""What an engine process prints, as records of our own log: one time stamp, and the level that it was written at."""

from __future__ import annotations

import logging
import re

# How the processes of an engine write: whoever reads their output knows the time, and one of them is enough.
FORMAT = "%(levelname)s %(name)s: %(message)s"
_RECORD = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (inferd\.[\w.]+(?:\[\d+\])?): (.*)")


class LogRelay:
    """Called with one line after the other. A line that is no record (of a traceback, of a library in C) belongs to the
    record before it. `label` says whose engine it is, where there are several: before the text, and as the record's
    attribute `model`.
    """

    def __init__(self, label: str = "") -> None:
        self._prefix = f"[{label}] " if label else ""
        self._extra = {"model": label} if label else None
        self._level = logging.INFO
        self._logger = logging.getLogger("inferd.engine")

    def __call__(self, line: str) -> None:
        record = _RECORD.fullmatch(line)
        if record is not None:
            self._level = logging.getLevelNamesMapping()[record[1]]
            self._logger = logging.getLogger(record[2])
        text = line if record is None else record[3]
        self._logger.log(self._level, "%s%s", self._prefix, text, extra=self._extra)


def child_level() -> str:
    """What an engine process should write: all that is logged here, and what may explain its death."""
    return logging.getLevelName(min(logging.getLogger("inferd.engine").getEffectiveLevel(), logging.INFO))
