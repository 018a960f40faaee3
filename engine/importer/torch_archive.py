"""A checkpoint in `torch.save`'s zip format (PyTorch 1.6 and later), read without running anything. No torch."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from inferd.engine.errors import LoadError
from inferd.engine.importer.torch_pickle import MAX_PICKLE_BYTES, StorageRef, TensorRef, read_pickle

MAX_ENTRIES = 100_000
_CHUNK_BYTES = 16 << 20
_LEGACY_MAGIC = bytes.fromhex("8002 8a0a 6cfc 9c46 f920 6aa8 5019")
# What zipfile raises for bytes that are no archive of its kind.
_DAMAGED = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error)


class TorchArchive:
    """A context manager. Every method raises LoadError naming the file and the cause."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._zip = _open_zip(path)
        try:
            self._entries = self._checked_entries(path.stat().st_size)
            self._root = self._find_root()
        except BaseException:
            self._zip.close()
            raise
        self._loaded: tuple[str, bytes] | None = None  # the last storage that had to be read as a whole

    def __enter__(self) -> TorchArchive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._zip.close()

    def tensors(self) -> dict[str, TensorRef]:
        """The state dictionary: the file's top level, or what it holds under "state_dict"."""
        content = read_pickle(self._read(f"{self._root}data.pkl", MAX_PICKLE_BYTES), self._name)
        if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
            content = content["state_dict"]
        if not isinstance(content, dict) or not content:
            raise self._error("holds no dictionary of tensors")
        return {self._tensor_name(name, value): value for name, value in content.items()}

    def read(self, tensor: TensorRef) -> Iterator[bytes]:
        """The tensor's elements in row-major order, little endian, in pieces."""
        if 0 in tensor.shape:
            return iter(())
        whole = tensor.offset == 0 and tensor.num_bytes == tensor.storage.num_elements * tensor.storage.type.num_bytes
        return self._stream(tensor.storage) if whole and tensor.is_contiguous else iter((self._gather(tensor),))

    def _error(self, cause: str) -> LoadError:
        return LoadError(f"{self._name}: {cause}")

    def _checked_entries(self, file_bytes: int) -> dict[str, zipfile.ZipInfo]:
        entries = {entry.filename: entry for entry in self._zip.infolist()}
        if len(entries) > MAX_ENTRIES:
            raise self._error(f"has {len(entries)} entries, more than {MAX_ENTRIES}")
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries.values()):
            raise self._error("has compressed or encrypted entries, which torch.save does not write")
        sizes = [entry.file_size for entry in entries.values()]
        if sum(sizes) > file_bytes or any(not 0 <= entry.header_offset < file_bytes for entry in entries.values()):
            raise self._error("has entries that lie outside the file")
        return entries

    def _find_root(self) -> str:
        roots = [name.removesuffix("data.pkl") for name in self._entries if name.endswith("/data.pkl")]
        if len(roots) != 1 or roots[0].count("/") != 1:
            raise self._error("is not a checkpoint of torch.save: it has no data.pkl in one folder")
        if any(name.startswith(f"{roots[0]}code/") for name in self._entries):
            raise self._error("is a TorchScript program, not a checkpoint; save its state_dict() instead")
        byte_order = f"{roots[0]}byteorder"
        if byte_order in self._entries and self._read(byte_order, 16) != b"little":
            raise self._error("is big endian, which is not supported")
        return roots[0]

    def _tensor_name(self, name: Any, value: Any) -> str:
        if not isinstance(name, str):
            raise self._error(f"the name {str(name)[:40]!r} of a tensor is no text")
        if not isinstance(value, TensorRef):
            raise self._error(f"{name[:80]!r} is not a tensor; save only model.state_dict()")
        return name

    def _entry(self, storage: StorageRef) -> zipfile.ZipInfo:
        entry = self._entries.get(f"{self._root}data/{storage.key}")
        if entry is None:
            raise self._error(f"the storage {storage.key[:40]!r} is missing")
        if entry.file_size != storage.num_elements * storage.type.num_bytes:
            raise self._error(
                f"the storage {storage.key[:40]!r} has {entry.file_size} bytes for {storage.num_elements} elements"
            )
        return entry

    def _read(self, name: str, limit_bytes: int) -> bytes:
        if self._entries[name].file_size > limit_bytes:
            raise self._error(f"{name} has more than {limit_bytes} bytes")
        return b"".join(self._chunks(self._entries[name]))

    def _stream(self, storage: StorageRef) -> Iterator[bytes]:
        yield from self._chunks(self._entry(storage))

    def _chunks(self, entry: zipfile.ZipInfo) -> Iterator[bytes]:
        try:
            with self._zip.open(entry) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except _DAMAGED as error:
            raise self._error(f"{entry.filename[:80]!r} is damaged: {error}") from error

    def _gather(self, tensor: TensorRef) -> bytes:
        storage = tensor.storage
        if self._loaded is None or self._loaded[0] != storage.key:
            self._loaded = storage.key, b"".join(self._stream(storage))
        elements = np.frombuffer(self._loaded[1], dtype=f"<u{storage.type.num_bytes}")
        strides = [step * storage.type.num_bytes for step in tensor.stride]
        view = np.lib.stride_tricks.as_strided(elements[tensor.offset :], tensor.shape, strides, writeable=False)
        return view.tobytes()


def _open_zip(path: Path) -> zipfile.ZipFile:
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        raise LoadError(f"{path.name}: is not a regular file")
    with path.open("rb") as file:
        start = file.read(len(_LEGACY_MAGIC))
    if start == _LEGACY_MAGIC:
        raise LoadError(
            f"{path.name}: was saved in torch's legacy format (before PyTorch 1.6), which is not supported; "
            "load and save it once with a newer PyTorch"
        )
    try:
        return zipfile.ZipFile(path)
    except _DAMAGED as error:
        raise LoadError(f"{path.name}: is not a checkpoint of torch.save: {error}") from error
