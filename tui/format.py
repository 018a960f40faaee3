"""Numbers, times and bars as a narrow screen shows them: pure functions from values to text."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MINUTE, HOUR, DAY = 60, 3600, 86400


@dataclass(frozen=True)
class Glyphs:
    """What is drawn with; the plain set is for terminals that have ASCII alone."""

    full: str
    empty: str
    cursor: str
    alert: str
    sleeping: str
    ticks: str  # eight heights of a column
    cross: str
    edge: str


FANCY = Glyphs("▓", "░", "▸", "▲", "z", "▁▂▃▄▅▆▇█", "✕", "│")
PLAIN = Glyphs("#", ".", ">", "!", "z", "__..--==", "x", "|")


def gib(num_bytes: float) -> str:
    """In GiB with one digit; small amounts keep a trace of themselves."""
    value = num_bytes / GIB
    return f"{value:.1f}" if value >= 0.05 or num_bytes == 0 else "<0.1"


def amount(num_bytes: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def span(seconds: float) -> str:
    """0.4s, 12s, 5m, 2h07, 3d04h."""
    seconds = max(seconds, 0.0)
    if seconds < 1:
        return f"{seconds:.1f}s"
    if seconds < MINUTE:
        return f"{seconds:.0f}s"
    if seconds < HOUR:
        return f"{seconds // MINUTE:.0f}m"
    if seconds < DAY:
        return f"{seconds // HOUR:.0f}h{seconds % HOUR // MINUTE:02.0f}"
    return f"{seconds // DAY:.0f}d{seconds % DAY // HOUR:02.0f}h"


def thousands(number: float) -> str:
    return f"{number:,.0f}"


def tokens(number: int) -> str:
    """16384 → 16k."""
    if number >= 1024 and number % 1024 == 0 and number < 1 << 20:
        return f"{number // 1024}k"
    return f"{number // 1000}k" if number >= 10_000 else str(number)


def bar(fraction: float, width: int, glyphs: Glyphs = FANCY) -> str:
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    return glyphs.full * filled + glyphs.empty * (width - filled)


def sparkline(values: list[float], width: int, glyphs: Glyphs = FANCY, top: float | None = None) -> str:
    """The newest on the right; as high as the highest, or `top`."""
    shown = values[-width:]
    highest = top if top is not None else max(shown, default=0.0)
    steps = len(glyphs.ticks) - 1
    line = "".join(glyphs.ticks[round(min(value / highest, 1.0) * steps) if highest > 0 else 0] for value in shown)
    return line.rjust(width)


def cut(text: str, width: int) -> str:
    """Never wider; what is missing shows."""
    if len(text) <= width:
        return text
    return text[: max(width - 1, 0)] + "…" if width > 0 else ""


def short_id(request_id: str) -> str:
    """Enough to tell requests apart by eye; ids that people chose stay whole as far as there is room."""
    name = request_id.rpartition("-")[2] if request_id.startswith(("chatcmpl-", "cmpl-")) else request_id
    return name[:4] if len(name) >= 16 and all(letter in "0123456789abcdef" for letter in name) else name[:8]
