"""`file:` sources: a GGUF file or a model folder of this machine. The original is never changed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from inferd.appliance.downloads.digest import READ_BYTES, FileHasher, hash_file
from inferd.appliance.downloads.disk import Disk, full_disk_is_an_error_of_ours, sync_folder
from inferd.appliance.downloads.importer import ModelImporter
from inferd.appliance.downloads.offer import Delivery, Offer, Staging, identity_of
from inferd.appliance.downloads.progress import PullProgress, Report
from inferd.appliance.downloads.retry import StopSignal
from inferd.appliance.downloads.select import (
    GGUF_NAME,
    NESTED_FILES,
    PICKLE_SUFFIXES,
    WEIGHTS_INDEX,
    Selection,
    select_files,
)
from inferd.appliance.downloads.shards import check_index
from inferd.appliance.downloads.source import Source
from inferd.appliance.library.errors import InvalidSource, SourceNotFound, UnsupportedModel
from inferd.appliance.library.names import name_from
from inferd.appliance.library.records import ModelFile

# Another file system, one without links, a file that is not ours to link to, one with too many links.
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


class LocalProvider:
    def __init__(self, importer: ModelImporter, disk: Disk, stop: StopSignal) -> None:
        self._importer = importer
        self._disk = disk
        self._stop = stop

    def offer(self, source: Source, report: Report) -> Offer:
        path = Path(source.name)
        selection, folder = _look(path)
        originals = {name: _regular(folder / name) for name in (*selection.config, *selection.weights)}
        if selection.format == "safetensors":
            self._importer.check(folder)
            if WEIGHTS_INDEX in selection.config:
                check_index(folder / WEIGHTS_INDEX, selection.weights)
        hashes = {name: self._hash(name, original, report) for name, original in originals.items()}

        def deliver(staging: Staging, report: Report) -> Delivery:
            files = []
            for name, original in originals.items():
                dest = staging.model / (GGUF_NAME if selection.format == "gguf" else name)
                dest.parent.mkdir(exist_ok=True, mode=0o700)
                self._place(original, dest, report)
                files.append(ModelFile(str(dest.relative_to(staging.model)), dest.stat().st_size, hashes[name]))
            return Delivery(files, selection.weights[0], selection.format)

        return Offer(
            source=source,
            model_id=name_from(path.name.removesuffix(".gguf")),
            aliases=(),
            revision=None,
            identity=identity_of([part for pair in hashes.items() for part in pair]),
            needed_bytes=0,  # usually links; a copy asks for room itself
            deliver=deliver,
        )

    def _hash(self, name: str, path: Path, report: Report) -> str:
        size_bytes = path.stat().st_size
        hasher = FileHasher(None, size_bytes)

        def on_bytes(done: int) -> None:
            self._stop.check()
            report(PullProgress("verifying", name, done, size_bytes))

        hash_file(path, hasher, on_bytes)
        return hasher.sha256

    def _place(self, original: Path, dest: Path, report: Report) -> None:
        """A second name for the same bytes where the file system can do that, else a copy."""
        dest.unlink(missing_ok=True)
        try:
            os.link(original, dest)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            self._copy(original, dest, report)

    def _copy(self, original: Path, dest: Path, report: Report) -> None:
        size_bytes = original.stat().st_size
        self._disk.require(size_bytes, dest.parent, dest.name)
        scratch = dest.with_name(dest.name + ".copying")
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with original.open("rb") as file, full_disk_is_an_error_of_ours(dest.parent, dest.name):
                done = 0
                while data := file.read(READ_BYTES):
                    self._stop.check()
                    self._disk.write_all(fd, data)
                    done += len(data)
                    report(PullProgress("downloading", dest.name, done, size_bytes))
                os.fsync(fd)
        except BaseException:
            scratch.unlink()
            raise
        finally:
            os.close(fd)
        scratch.rename(dest)
        sync_folder(dest.parent)


def _look(path: Path) -> tuple[Selection, Path]:
    """What to take, and the folder it lies in."""
    if path.is_dir():
        names = [entry.name for entry in path.iterdir()]
        names += [name for name in NESTED_FILES if (path / name).is_file()]
        return select_files(names, None, str(path)), path
    if not path.exists():
        raise SourceNotFound(f"there is no file or folder {path}")
    if path.suffix.lower() == ".gguf":
        return select_files([path.name], path.name, str(path)), path.parent
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise UnsupportedModel(
            f"{path} is in a format that can run code when it is read; run `inferd convert` on its folder and pull the "
            "result"
        )
    raise InvalidSource(f"{path} is neither a GGUF file nor a folder; of a model with safetensors, name the folder")


def _regular(path: Path) -> Path:
    """The file behind links (a hub's cache is full of those). Raises `InvalidSource` for devices, pipes and folders."""
    target = path.resolve()
    if not target.exists():
        raise SourceNotFound(f"there is no file {path}")
    if not stat.S_ISREG(target.stat().st_mode):
        raise InvalidSource(f"{path} is not a regular file")
    return target
