"""How long a model stays loaded after its last request, in the words that Ollama's clients send."""

from __future__ import annotations

import math
import re

PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_keep_alive(value: str | float) -> float | None:
    """Seconds; None: for ever. "10m", "1h30m", "300", 300; a negative number: for ever; 0: unload at once.

    Raises ValueError for anything else.
    """
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"keep_alive: {value!r} is no duration")
    if isinstance(value, int | float):
        return None if value < 0 else float(value)
    text = value.strip().lower()
    if text in ("forever", "never"):
        return None
    try:
        return parse_keep_alive(float(text))
    except ValueError:
        pass
    negative, text = text.startswith("-"), text.removeprefix("-")
    parts = PART.findall(text)
    if not parts or "".join(amount + unit for amount, unit in parts) != text:
        raise ValueError(f'keep_alive: {value!r} is no duration; write "10m", "1h30m", 300, 0 or -1')
    return None if negative else sum(float(amount) * SECONDS[unit] for amount, unit in parts)
