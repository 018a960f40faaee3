"""The folders of pulls on their way, and what becomes of them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from inferd.appliance.downloads.offer import Offer, Staging
from inferd.appliance.downloads.partfile import JOURNAL_SUFFIX
from inferd.appliance.library.library import MODELS_FOLDER, Library
from inferd.appliance.library.names import IDENTITY_CHARS, folder_name
from inferd.appliance.library.records import ModelFile

PARTS_FOLDER = ".partial"
MODEL_FOLDER = "model"  # within a staging
NOTE = "pull.json"  # beside it: whose staging this is
KEEP_PARTS_S = 14 * 24 * 3600.0  # an unfinished pull that nobody came back to


class PullNote(msgspec.Struct, frozen=True):
    """What a staging is the beginning of. `name`: what the caller wants the model to be called, if anything."""

    model: str
    source: str
    name: str | None = None


class UnfinishedPull(msgspec.Struct, frozen=True):
    """`source` is None for a pull that was ended before it could say what it was."""

    model: str
    source: str | None
    name: str | None
    num_bytes: int


class Stagings:
    """Only the holder of the library's lock may call what changes something."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._parts = library.models_folder / PARTS_FOLDER

    def open(self, offer: Offer, name: str | None = None) -> Staging:
        """The staging of this very content, as an earlier pull left it. Parts of other contents of the model go.

        `name` is what the caller wants the model to be called.
        """
        folder = self._parts / folder_name(offer.model_id, offer.identity)
        staging = Staging(folder / "work", folder / MODEL_FOLDER)
        for other in self._entries():
            if other != folder and _model_of(other) == _model_of(folder):
                shutil.rmtree(other)
        for inner in (staging.work, staging.model):
            inner.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / NOTE).write_bytes(msgspec.json.encode(PullNote(offer.model_id, str(offer.source), name)))
        os.utime(folder)  # somebody came back to it
        return staging

    def keep_only(self, staging: Staging, files: list[ModelFile]) -> None:
        """Leaves in the model's folder what was delivered, and nothing that an earlier, killed pull had beside it."""
        names = {file.name for file in files}
        for path in filter(Path.is_file, list(staging.model.rglob("*"))):
            if str(path.relative_to(staging.model)) not in names:
                path.unlink()

    def close(self, staging: Staging) -> None:
        shutil.rmtree(staging.work.parent)

    def close_if_empty(self, staging: Staging) -> None:
        """After a pull that ended early: a staging stays while the next pull can use what is in it."""
        if not any(path.is_file() and _is_content(path) and path.stat().st_size for path in _walk(staging)):
            self.close(staging)

    def drop(self, model: str) -> int | None:
        """Deletes what an unfinished pull of that model has; the bytes that this frees, None when there is none."""
        entries = [entry for entry in self._entries() if _read_note(entry).model == model]
        num_bytes = sum(size_of(entry) for entry in entries)
        for entry in entries:
            shutil.rmtree(entry)
        return num_bytes if entries else None

    def home_of(self, offer: Offer) -> str:
        """Where the model's folder goes, relative to the home."""
        return f"{MODELS_FOLDER}/{folder_name(offer.model_id, offer.identity)}"

    def sweep(self) -> None:
        """Deletes what a killed pull left and nothing can use: discarded folders, stagings whose model has been put in
        place, and parts two weeks old. Only while no pull runs.
        """
        for path in self._library.discarded():
            self._library.erase(path)
        for part in self._entries():
            if not (part / MODEL_FOLDER).exists() or time.time() - part.stat().st_mtime > KEEP_PARTS_S:
                shutil.rmtree(part)

    def unfinished(self) -> list[UnfinishedPull]:
        return unfinished_pulls(self._library.models_folder)

    def _entries(self) -> list[Path]:
        return _entries_of(self._parts)


def unfinished_pulls(models_folder: Path) -> list[UnfinishedPull]:
    """Only looks. Raises `OSError` where it may not."""
    pulls = []
    for entry in _entries_of(models_folder / PARTS_FOLDER):
        note = _read_note(entry)
        pulls.append(UnfinishedPull(note.model, note.source or None, note.name, size_of(entry)))
    return sorted(pulls, key=lambda pull: pull.model)


def _entries_of(parts: Path) -> list[Path]:
    if not parts.is_dir():
        return []
    return [entry for entry in parts.iterdir() if entry.is_dir() and not entry.is_symlink()]


def _model_of(entry: Path) -> str:
    """The part of a staging's name that is the model's, with a dash."""
    return entry.name[:-IDENTITY_CHARS]


def _read_note(entry: Path) -> PullNote:
    try:
        return msgspec.json.decode((entry / NOTE).read_bytes(), type=PullNote)
    except (FileNotFoundError, msgspec.DecodeError):  # it was killed before it had written its note
        return PullNote(_model_of(entry)[:-1].replace("--", "/"), "")


def _walk(staging: Staging) -> Iterator[Path]:
    yield from staging.work.rglob("*")
    yield from staging.model.rglob("*")


def _is_content(path: Path) -> bool:
    return not path.name.endswith(JOURNAL_SUFFIX)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
