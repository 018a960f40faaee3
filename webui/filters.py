"""How values look on a page: pure functions, used as template filters."""

from __future__ import annotations

import time

GIB = 1 << 30


def gib(num_bytes: float) -> str:
    value = num_bytes / GIB
    return f"{value:.1f}" if value >= 0.05 or num_bytes == 0 else "<0.1"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return ""
    for unit, bound in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= bound:
            return f"{num_bytes / bound:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def span(seconds: float | None) -> str:
    """0.4 s, 12 s, 5 min, 2 h 07, 3 d 04 h."""
    if seconds is None:
        return ""
    seconds = max(seconds, 0.0)
    if seconds < 1:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f}"
    return f"{seconds // 86400:.0f} d {seconds % 86400 // 3600:02.0f} h"


def ago(at: float | None) -> str:
    return "" if at is None else f"{span(time.time() - at)} ago"


def clock(at: float | None) -> str:
    """For the title of a relative time."""
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def thousands(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def words(name: str) -> str:
    return name.replace("_", " ")


FILTERS = {
    "gib": gib,
    "size": size,
    "span": span,
    "ago": ago,
    "clock": clock,
    "thousands": thousands,
    "percent": percent,
    "words": words,
}
