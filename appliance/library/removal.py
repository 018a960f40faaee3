"""Taking a model out of the library, and what that gives back."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from inferd.appliance.library.library import Library


class Removed(msgspec.Struct, frozen=True):
    """`shared_bytes`: in files that have another name elsewhere, so their bytes stay. `kept_folder`: a folder that is
    not the library's own, and was left alone.
    """

    model: str
    freed_bytes: int
    shared_bytes: int = 0
    kept_folder: str | None = None


def remove_model(library: Library, name: str) -> Removed:
    """Raises `ModelNotFound`. Only a holder of the library's lock may call it."""
    record = library.find(name)
    folder = library.folder(record)
    if not library.owns(record):
        library.remove(record.id)
        return Removed(record.id, 0, kept_folder=str(folder))
    files = list(_files(folder))
    shared_bytes = sum(file.st_size for file in files if file.st_nlink > 1)
    freed_bytes = sum(file.st_size for file in files) - shared_bytes
    library.remove(record.id)
    return Removed(record.id, freed_bytes, shared_bytes)


def _files(folder: Path) -> Iterator[os.stat_result]:
    for path in folder.rglob("*"):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode):
            yield found
