"""What can go wrong with the library and its downloads; each error knows the exit code of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class LibraryError(Exception):
    """`code` goes into JSON, `exit_code` to the shell; `retryable`: the same call may succeed later, unchanged."""

    code = "library_error"
    exit_code = 1
    retryable = False


class InvalidName(LibraryError):
    """A model's name does not follow the grammar of names."""

    code = "invalid_name"
    exit_code = 2


class InvalidSource(LibraryError):
    """What should name a source does not follow the grammar, or names nothing that can be served."""

    code = "invalid_source"
    exit_code = 2


class ModelNotFound(LibraryError):
    """No model of that name is in the library; `near` are names that look like it."""

    code = "model_not_found"
    exit_code = 4

    def __init__(self, name: str, near: Sequence[str]) -> None:
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `inferd ls` lists what there is"
        super().__init__(f"no model {name!r} in the library{hint}")
        self.name = name
        self.near = tuple(near)


class EmptyLibrary(LibraryError):
    """Any model would have done, and there is none."""

    code = "model_not_found"
    exit_code = 4

    def __init__(self) -> None:
        super().__init__("the library has no model yet; bring one with `inferd pull SOURCE`")


class NameTaken(LibraryError):
    """The name belongs to a model from another source."""

    code = "name_taken"


class SchemaTooNew(LibraryError):
    """A newer inferd wrote the database."""

    code = "schema_too_new"


class LibraryUnreadable(LibraryError):
    """The database is damaged, or no database."""

    code = "library_unreadable"


class LibraryBusy(LibraryError):
    """Another process is changing the library; `pid` is that process where known."""

    code = "library_busy"
    exit_code = 75
    retryable = True

    def __init__(self, pid: int | None) -> None:
        who = f"process {pid}" if pid else "another process"
        super().__init__(f"{who} is changing the library; try again when it is done")
        self.pid = pid


class ModelInUse(LibraryError):
    """The model cannot be taken away now: it is loaded, or on its way into the library."""

    code = "model_in_use"
    exit_code = 5


class HomeServed(LibraryError):
    """A daemon that we cannot ask serves models of this home."""

    code = "home_served"
    exit_code = 5

    def __init__(self, home: Path) -> None:
        super().__init__(f"a daemon serves models of {home}, at another address; name it with --host and --port")


class SourceNotFound(LibraryError):
    """The index, the hub or the disk has no such thing."""

    code = "source_not_found"
    exit_code = 4


class AccessDenied(LibraryError):
    """The other side wants a token, or a better one."""

    code = "access_denied"
    exit_code = 6


class NetworkFailure(LibraryError):
    """The other side cannot be reached, or keeps failing."""

    code = "network_failure"
    exit_code = 75
    retryable = True


class PullStopped(LibraryError):
    """The pull was told to stop; what has arrived stays and is used by the next one."""

    code = "pull_stopped"
    exit_code = 75
    retryable = True


class PullCancelled(LibraryError):
    """Somebody does not want the model any more; what has arrived is given back."""

    code = "pull_cancelled"
    exit_code = 130


class Unexpected(LibraryError):
    """A mistake of ours; the log has it."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("the daemon failed at this for a reason of its own; its log has it")


class BadTransfer(LibraryError):
    """The other side does not send what it announced."""

    code = "bad_transfer"


class DigestMismatch(BadTransfer):
    """The bytes are not the bytes that were announced. Nothing was put in place."""

    code = "digest_mismatch"

    def __init__(self, what: str, expected: str, found: str) -> None:
        super().__init__(
            f"{what} is not what was announced: expected {expected}, found {found}. It was thrown away; "
            "pull again, and if that does not help, somebody changed the file"
        )
        self.expected = expected
        self.found = found


class DiskFull(LibraryError):
    """The disk has no room for it."""

    code = "disk_full"
    exit_code = 7


class UnsupportedModel(LibraryError):
    """The model's files are not something that this engine serves."""

    code = "unsupported_model"
