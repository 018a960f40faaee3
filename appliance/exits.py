"""How a verb of the command line ends: what it prints, and its exit code."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

import typer

from inferd.appliance.client import NotRunning, Refused
from inferd.appliance.library.errors import LibraryError
from inferd.appliance.listener import PortTaken
from inferd.appliance.settings import SettingsError
from inferd.appliance.supervisor.errors import UnknownModel
from inferd.engine.errors import ConfigError, EngineError

P = ParamSpec("P")
EXPECTED = (EngineError, LibraryError, NotRunning, OSError, PortTaken, Refused, SettingsError, UnknownModel)


def exit_code_of(error: BaseException) -> int:
    """1 failure · 3 not running · 4 not found · 5 refused · 7 disk · 75 try again · 78 bad config · 130 Ctrl-C."""
    match error:
        case LibraryError():
            return error.exit_code
        case OSError():
            return 7 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1
        case SettingsError() | ConfigError():
            return 78
        case NotRunning():
            return 3
        case UnknownModel():
            return 4
        case Refused():
            return {403: 5, 404: 4, 408: 75, 429: 75, 503: 75}.get(error.status, 1)
        case KeyboardInterrupt():
            return 130
    return 1


def with_exit_codes(verb: Callable[P, None]) -> Callable[P, None]:
    """What a person may cause ends in one line and a code; everything else stays a traceback."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except KeyboardInterrupt as error:
            raise typer.Exit(exit_code_of(error)) from None
        except EXPECTED as error:
            typer.echo(f"inferd: {error}", err=True)
            logging.getLogger("inferd").debug("the cause", exc_info=error)
            raise typer.Exit(exit_code_of(error)) from error

    return run
