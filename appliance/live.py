"""The one owner of what the daemon runs with now. Whoever needs a setting asks here at the moment of use.

    SIGHUP → `reload` → read and check everything → swap → listeners

Whatever is wrong with a file, the settings of before stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from inferd.appliance.described import described, shown, values_of
from inferd.appliance.settings import Settings

log = logging.getLogger(__name__)

LIVE = frozenset(
    {
        "body_timeout_s",
        "drain_s",
        "keep_alive",
        "keepalive_s",
        "load_timeout_s",
        "log_level",
        "max_loaded_models",
        "max_open_requests",
        "memory_budget_bytes",
        "sleep_s",
    }
)  # each is read at the moment of use; whatever else is new waits for the next start
AT_LOAD = frozenset({"reasoning_parser", "tool_parser"})  # read whenever a model is loaded,
ENGINE = "engine"  # as is all of this table,
FIXED = frozenset({"engine.device"})  # but for what decides which memory everything is counted in


@dataclass(frozen=True)
class Reloaded:
    """Keys by what became of their new values."""

    effective: tuple[str, ...] = ()
    at_next_load: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()


class LiveSettings:
    """`load` reads the settings anew, as they were read at the start. Raises what `load` raises."""

    def __init__(self, settings: Settings, load: Callable[[], Settings] | None = None) -> None:
        self._current = settings
        self._load = load
        self._wanted = settings
        self._listeners: list[Callable[[], None]] = []

    @property
    def current(self) -> Settings:
        return self._current

    def on_change(self, listener: Callable[[], None]) -> None:
        """`listener` is called after a reload that has changed something; it finds the new values in `current`."""
        self._listeners.append(listener)

    def reload(self) -> Reloaded:
        """Raises `SettingsError`, and then nothing has changed."""
        return self.take(self._load() if self._load is not None else self._current)

    def take(self, wanted: Settings) -> Reloaded:
        """All of it that can change while the daemon runs."""
        outcome = compare(self._current, wanted)
        self._wanted = wanted
        self._current = merge(self._current, wanted)
        if outcome.effective or outcome.at_next_load:
            self._tell()
        return outcome

    def described(self) -> list[tuple[str, str, str]]:
        """As `described.described`; the origin also says what a restart would change."""
        waiting = dict.fromkeys(compare(self._current, self._wanted).needs_restart)
        wanted = dict(values_of(self._wanted))
        return [
            (key, value, f"{origin}; {shown(key, wanted[key])} after a restart" if key in waiting else origin)
            for key, value, origin in described(self._current)
        ]

    def _tell(self) -> None:
        for listener in self._listeners:
            try:
                listener()
            except Exception:
                log.exception("a changed setting could not be passed on")


def compare(current: Settings, wanted: Settings) -> Reloaded:
    before = dict(values_of(current))
    changed = [key for key, value in values_of(wanted) if value != before[key]]
    soon = [key for key in changed if is_read_at_load(key)]
    return Reloaded(
        tuple(key for key in changed if key in LIVE),
        tuple(soon),
        tuple(key for key in changed if key not in LIVE and key not in soon),
    )


def merge(current: Settings, wanted: Settings) -> Settings:
    """`current` with those values of `wanted` that can change while the daemon runs."""
    fixed = {key.partition(".")[2]: getattr(current.engine, key.partition(".")[2]) for key in FIXED}
    changes = {key: getattr(wanted, key) for key in LIVE | AT_LOAD}
    changes[ENGINE] = wanted.engine.model_copy(update=fixed)
    merged = current.model_copy(update=changes)
    taken = {key: wanted if key in LIVE or is_read_at_load(key) else current for key, _ in values_of(current)}
    return merged.with_origins({key: settings.origin_of(key) for key, settings in taken.items()})


def is_read_at_load(key: str) -> bool:
    return key in AT_LOAD or (key.startswith(f"{ENGINE}.") and key not in FIXED)
