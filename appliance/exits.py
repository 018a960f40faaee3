"""How a verb of the command line ends: what it prints, and its exit code."""

from __future__ import annotations

import errno
import functools
import logging
import os
import select
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


BROKEN_PIPE = 141  # what a shell reports of a program that SIGPIPE ended


def exit_code_of(error: BaseException) -> int:
    """1 failure · 3 not running · 4 not found · 5 refused · 6 other credentials · 7 disk · 75 try again ·
    78 bad config · 130 Ctrl-C.
    """
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
            return {401: 6, 403: 5, 404: 4, 408: 75, 409: 5, 429: 75, 503: 75}.get(error.status, 1)
        case KeyboardInterrupt():
            return 130
    return 1


def with_exit_codes(verb: Callable[P, None]) -> Callable[P, None]:
    """What a person may cause ends in one line and a code; everything else stays a traceback.

    A reader that has seen enough (`inferd ls | head -1`) is told nothing, and nothing more is written.
    """

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except KeyboardInterrupt as error:
            raise typer.Exit(exit_code_of(error)) from None
        except EXPECTED as error:
            if isinstance(error, BrokenPipeError) and _let_go_of_broken_pipes():
                raise typer.Exit(BROKEN_PIPE) from None
            typer.echo(f"inferd: {error}", err=True)
            logging.getLogger("inferd").debug("the cause", exc_info=error)
            raise typer.Exit(exit_code_of(error)) from error

    return run


def _let_go_of_broken_pipes() -> bool:
    """Whether one of our own outputs has no reader; what is still to be written to it goes nowhere."""
    broken = False
    for fd in (1, 2):
        poll = select.poll()
        poll.register(fd, 0)
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            broken = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, fd)
            os.close(null)
    return broken
