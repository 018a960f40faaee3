"""Reading the settings again while the daemon serves, and saying what came of it: to the log and to systemd."""

from __future__ import annotations

import logging

from inferd.appliance.live import LiveSettings
from inferd.appliance.sdnotify import Notifier
from inferd.appliance.settings import SettingsError

log = logging.getLogger(__name__)


def reload_settings(live: LiveSettings, notifier: Notifier) -> None:
    """Never raises for a file that is wrong: the settings of before stay, and the log says why."""
    notifier.reloading()
    trouble = ""
    try:
        outcome = live.reload()
    except SettingsError as error:
        log.error("the settings stay as they were, because the new ones cannot be used: %s", error)
        trouble = f"settings not reloaded: {error}"
    else:
        for keys, text in (
            (outcome.effective, "settings reloaded; new values of: %s"),
            (outcome.at_next_load, "settings reloaded; models loaded from now on have new values of: %s"),
        ):
            if keys:
                log.info(text, ", ".join(keys))
        if outcome.needs_restart:
            trouble = f"needs a restart: {', '.join(outcome.needs_restart)}"
            log.warning("settings reloaded, but a new value %s", trouble)
        elif not (outcome.effective or outcome.at_next_load):
            log.info("settings reloaded; nothing has changed")
    finally:
        notifier.reloaded(trouble)
