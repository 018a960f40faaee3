"""Log lines of the daemon: one event a line, whatever a client put into it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0), 0x2028, 0x2029)}
LINE_BREAK_IN_TRACEBACK = "\n    "


class OneLine(logging.Formatter):
    """Escapes control characters of the message, so that a client cannot forge a line; tracebacks are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(CONTROL_CHARACTERS)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "    " + text.replace("\n", LINE_BREAK_IN_TRACEBACK)


class _Writer(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
        except Exception:
            self.handleError(record)


def write_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def set_up_logging(level: str, write: Callable[[str], None] = write_to_stderr) -> Callable[[], None]:
    """Hands every log line to `write`; the returned function takes that back."""
    handler = _Writer(write)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    set_level(level)

    def undo() -> None:
        root.removeHandler(handler)
        root.setLevel(before)

    return undo


def set_level(level: str) -> None:
    """Of our own loggers; others speak from "warning" on."""
    logging.getLogger("inferd").setLevel(level.upper())
