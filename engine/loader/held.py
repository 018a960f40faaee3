"""A checkpoint whose files stay open, so that the same weights can be loaded again."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from inferd.engine.config import EngineConfig
from inferd.engine.errors import LoadError
from inferd.engine.layers.target import TORCH_DTYPES
from inferd.engine.loader.base import CheckpointTensors, gguf_file
from inferd.engine.loader.safetensors import Shard, read_shards, shard_tensors


@dataclass(frozen=True)
class _Identity:
    """What tells whether a file is still the one that was loaded."""

    num_bytes: int
    changed_ns: int


class _OpenFile:
    """Mapped too, which costs nothing until a page is read."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}") from error
        found = os.fstat(self._fd)
        self.identity = _Identity(found.st_size, found.st_mtime_ns)
        self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ) if found.st_size else None
        self.close = weakref.finalize(self, _close, self._fd, self._map)

    @property
    def path(self) -> Path:
        """Good for as long as it is open, whatever becomes of the file's name."""
        return Path(f"/proc/self/fd/{self._fd}")

    def read_ahead(self) -> None:
        """Have it in main memory soon, as pages that the system takes back when it needs them."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_WILLNEED)


def _close(fd: int, mapped: mmap.mmap | None) -> None:
    if mapped is not None:
        mapped.close()
    os.close(fd)


class HeldCheckpoint:
    """The files that `config` is loaded from; none for made-up weights.

    Open, it gives the weights that it gave before, even when the folder has changed or is gone. Closed and opened
    again, it makes sure that the files are the same. Raises LoadError as reading a checkpoint does.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._identities: dict[Path, _Identity] | None = None  # of the files as they were when they were opened first
        self._shards: dict[Path, Shard] = {}
        self._files: dict[Path, _OpenFile] = {}
        self.open()

    @property
    def num_bytes(self) -> int:
        """Of what is open."""
        return sum(file.identity.num_bytes for file in self._files.values())

    def open(self) -> None:
        """Of no effect on one that is open."""
        if self._files or self._config.load_format == "dummy":
            return
        folder = self._config.model.path
        if not folder.is_dir():
            raise LoadError(f"{folder} is gone: there is nothing to load the model from")
        if self._config.load_format == "safetensors":
            self._shards = {shard.path: shard for shard in read_shards(folder)}
        paths = list(self._shards) or [gguf_file(folder)]
        self._files = {path: _OpenFile(path) for path in paths}
        identities = {path: file.identity for path, file in self._files.items()}
        if self._identities not in (None, identities):
            self.close()
            raise LoadError(f"{folder} holds another checkpoint than the one that was loaded: load the model anew")
        self._identities = identities

    def close(self) -> None:
        """Idempotent."""
        for file in self._files.values():
            file.close()
        self._files, self._shards = {}, {}

    def read_ahead(self) -> None:
        for file in self._files.values():
            file.read_ahead()

    def tensors(self) -> CheckpointTensors:
        """As `checkpoint_tensors` gives them, while it is open."""
        for path, file in self._files.items():
            try:
                for name, tensor in self._tensors_of(path, file.path):
                    yield name, tensor, path
            except LoadError as error:  # it names the file as it was opened
                raise LoadError(str(error).replace(str(file.path), str(path))) from error

    def _tensors_of(self, path: Path, opened: Path) -> Iterator[tuple[str, Tensor]]:
        if self._config.load_format == "gguf":
            from inferd.engine.loader.gguf import iterate_gguf

            yield from iterate_gguf(opened, self._config.model, TORCH_DTYPES[self._config.dtype])
        else:
            yield from ((name, tensor) for name, tensor, _ in shard_tensors(replace(self._shards[path], path=opened)))
