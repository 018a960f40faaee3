"""What a file's bytes must hash to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Digest:
    """`git-sha1` is the id that git gives a blob: SHA-1 over a header with the size, then the bytes."""

    algorithm: Literal["sha256", "git-sha1"]
    hex: str

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"


class FileHasher:
    """SHA-256 of every file, and beside it the digest that was announced, in one pass."""

    def __init__(self, expected: Digest | None, size_bytes: int | None) -> None:
        self.expected = expected
        self._sha256 = hashlib.sha256()
        self._git = None
        if expected is not None and expected.algorithm == "git-sha1":
            if size_bytes is None:
                raise ValueError("a git digest needs the size of the file")
            self._git = hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def found(self) -> Digest:
        """Comparable with `expected`."""
        if self._git is not None:
            return Digest("git-sha1", self._git.hexdigest())
        return Digest("sha256", self.sha256)

    @property
    def matches(self) -> bool:
        return self.expected is None or self.found == self.expected


def hash_file(path: Path, hasher: FileHasher, on_bytes: Callable[[int], None]) -> None:
    """Feeds the file to `hasher`; `on_bytes` gets the bytes read so far."""
    done = 0
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            hasher.update(data)
            done += len(data)
            on_bytes(done)
