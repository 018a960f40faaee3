"""The folders of pulls on their way, and what becomes of them."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from inferd.appliance.downloads.offer import Offer, Staging
from inferd.appliance.library.library import MODELS_FOLDER, Library
from inferd.appliance.library.names import folder_name
from inferd.appliance.library.records import ModelFile

PARTS_FOLDER = ".partial"
MODEL_FOLDER = "model"  # within a staging
KEEP_PARTS_S = 14 * 24 * 3600.0  # an unfinished pull that nobody came back to


class Stagings:
    """Only the holder of the library's lock may call what changes something."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._parts = library.models_folder / PARTS_FOLDER

    def open(self, offer: Offer) -> Staging:
        """The staging of this very content, as an earlier pull left it. Parts of other contents of the model go."""
        name = folder_name(offer.model_id, offer.identity)
        staging = Staging(self._parts / name / "work", self._parts / name / MODEL_FOLDER)
        for other in self._entries():
            if other.name != name and other.name[:-12] == name[:-12]:
                shutil.rmtree(other)
        for folder in (staging.work, staging.model):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.utime(staging.work.parent)  # somebody came back to it
        return staging

    def keep_only(self, staging: Staging, files: list[ModelFile]) -> None:
        """Leaves in the model's folder what was delivered, and nothing that an earlier, killed pull had beside it."""
        names = {file.name for file in files}
        for path in staging.model.iterdir():
            if path.name not in names:
                path.unlink()

    def close(self, staging: Staging) -> None:
        shutil.rmtree(staging.work.parent)

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

    def unfinished_bytes(self) -> int:
        return sum(size_of(part) for part in self._entries())

    def _entries(self) -> list[Path]:
        if not self._parts.is_dir():
            return []
        return [entry for entry in self._parts.iterdir() if entry.is_dir() and not entry.is_symlink()]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
