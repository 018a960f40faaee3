"""What travels between `inferd pull` and a running daemon: one request, then one JSON object a line."""

from __future__ import annotations

import msgspec

from inferd.appliance.downloads.progress import PullProgress
from inferd.appliance.library.errors import LibraryError
from inferd.appliance.library.records import ModelRecord

PULL_PATH = "/admin/v1/downloads"


class PullRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`home`: the caller's; a daemon with another home refuses, because its library is not the one that is meant."""

    source: str
    name: str | None = None
    home: str | None = None


class PullFailure(msgspec.Struct, frozen=True):
    """A `LibraryError` on its way to the caller."""

    code: str
    message: str
    exit_code: int
    retryable: bool

    @classmethod
    def of(cls, error: LibraryError) -> PullFailure:
        return cls(error.code, str(error), error.exit_code, error.retryable)


class PullEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exactly one field is set. `model` and `error` are the last line of a stream; an empty line means "still here"."""

    progress: PullProgress | None = None
    model: ModelRecord | None = None
    error: PullFailure | None = None


class RemoteFailure(LibraryError):
    """What the daemon's pull failed with, as it was there."""

    def __init__(self, failure: PullFailure) -> None:
        super().__init__(failure.message)
        self.code = failure.code
        self.exit_code = failure.exit_code
        self.retryable = failure.retryable
