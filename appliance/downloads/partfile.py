"""A download on its way: `NAME.partial` with the bytes so far, and a journal that says what they are part of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from inferd.appliance.downloads.digest import READ_BYTES, Digest, FileHasher
from inferd.appliance.downloads.disk import Disk, full_disk_is_an_error_of_ours, sync_folder
from inferd.appliance.library.errors import DigestMismatch
from inferd.appliance.library.records import ModelFile

PART_SUFFIX = ".partial"
JOURNAL_SUFFIX = ".partial.json"


class Journal(msgspec.Struct, frozen=True):
    """What the bytes of a part are the beginning of. `url` carries no credentials; `etag` is of who sent them."""

    url: str
    digest: str | None
    size_bytes: int | None
    etag: str | None = None

    def continues(self, earlier: Journal) -> bool:
        """Whether bytes of `earlier` may be kept: the same content, or the same place with an entity tag to ask by."""
        if self.size_bytes != earlier.size_bytes or self.digest != earlier.digest:
            return False
        return self.digest is not None or (self.url == earlier.url and earlier.etag is not None)


class PartFile:
    """Owns the part, its journal and the running hash. Close it, or leave its `with` block. `name` is for people.

    The hash is of every byte written, so a finished file needs no second reading.
    """

    def __init__(self, dest: Path, name: str, wanted: Journal, digest: Digest | None, disk: Disk) -> None:
        self.dest = dest
        self.journal = wanted
        self.offset = 0
        self._name = name
        self._digest = digest
        self._disk = disk
        self._part = dest.with_name(dest.name + PART_SUFFIX)
        self._journal_path = dest.with_name(dest.name + JOURNAL_SUFFIX)
        self._hasher = self._new_hasher()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._part, flags, 0o600)

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def resume(self, on_bytes: Callable[[int], None]) -> None:
        """Takes over what an earlier attempt left, hashing it; starts anew where that is of something else."""
        earlier = self._read_journal()
        size_bytes = os.fstat(self._fd).st_size
        limit = self.journal.size_bytes
        if earlier is None or not self.journal.continues(earlier) or (limit is not None and size_bytes > limit):
            self.restart()
            return
        self.journal = msgspec.structs.replace(self.journal, etag=earlier.etag)
        while data := os.read(self._fd, READ_BYTES):
            self._hasher.update(data)
            self.offset += len(data)
            on_bytes(self.offset)

    def restart(self) -> None:
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.offset = 0
        self._hasher = self._new_hasher()

    def note(self, etag: str | None) -> None:
        """Writes the journal; called before the first byte of each answer."""
        self.journal = msgspec.structs.replace(self.journal, etag=etag)
        scratch = self._journal_path.with_name(self._journal_path.name + ".new")
        with full_disk_is_an_error_of_ours(self.dest.parent, self._name):
            scratch.write_bytes(msgspec.json.encode(self.journal))
            scratch.rename(self._journal_path)

    def append(self, data: bytes) -> None:
        with full_disk_is_an_error_of_ours(self.dest.parent, self._name):
            self._disk.write_all(self._fd, data)
        self._hasher.update(data)
        self.offset += len(data)

    def commit(self) -> ModelFile:
        """Verified, on disk, and only then under its own name. Raises `DigestMismatch`, and the part is gone."""
        if not self._hasher.matches:
            self.discard()
            raise DigestMismatch(self._name, str(self._hasher.expected), str(self._hasher.found))
        os.fsync(self._fd)
        self.close()
        self._part.rename(self.dest)
        sync_folder(self.dest.parent)
        self._journal_path.unlink(missing_ok=True)
        return ModelFile(self.dest.name, self.offset, self._hasher.sha256)

    def discard(self) -> None:
        self.close()
        self._part.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def _new_hasher(self) -> FileHasher:
        return FileHasher(self._digest, self.journal.size_bytes)

    def _read_journal(self) -> Journal | None:
        try:
            return msgspec.json.decode(self._journal_path.read_bytes(), type=Journal)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
