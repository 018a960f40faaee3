"""A bounded reader of GGUF headers: a model file is hostile input.

Reads versions 2 and 3, little endian. Every length is compared with the bytes that are there before anything is
allocated for it, so a file of n bytes costs memory in proportion to n, and at most a few hundred MB.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. No torch, no numpy.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from inferd.engine.errors import LoadError

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]
Buffer = bytes | mmap.mmap

# The largest headers in use (vocabularies of 256k tokens with merges) have about 16 MB and 1.3 million array elements.
MAX_HEADER_BYTES = 64 << 20
MAX_ARRAY_ELEMENTS = 4 << 20  # of all arrays together
MAX_STRING_BYTES = 8 << 20
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")

_T = TypeVar("_T", int, float, str, bool)
_KIND_NAMES: Mapping[type, str] = {int: "an integer", float: "a decimal number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class GGMLType:
    """How elements are stored: blocks of `block_size` elements along the last axis, `block_bytes` each."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: Mapping[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in torch's order: the last axis is the contiguous one."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset_bytes: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensor directory of one file. The readers below raise LoadError naming the key."""

    name: str  # of the file, for messages
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]

    def tensor(self, name: str) -> TensorInfo | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def text(self, key: str, default: str | None = None) -> str:
        return self._single(key, str, default)

    def integer(self, key: str, default: int | None = None) -> int:
        return self._single(key, int, default)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        return self._single(key, bool, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if type(value) is not float and type(value) is not int:
            raise self._mismatch(key, "a number", value)
        return float(value)

    def texts(self, key: str) -> tuple[str, ...]:
        return self._array(key, str)

    def integers(self, key: str) -> tuple[int, ...]:
        return self._array(key, int)

    def numbers(self, key: str) -> tuple[float, ...]:
        return self._array(key, float)

    def error(self, what: str, cause: str) -> LoadError:
        return LoadError(f"{self.name}: {what}: {cause}")

    def _single(self, key: str, kind: type[_T], default: _T | None) -> _T:
        value = self.metadata.get(key, default)
        if type(value) is not kind:  # exactly: a bool is an int to isinstance
            raise self._mismatch(key, _KIND_NAMES[kind], value)
        return value

    def _array(self, key: str, kind: type[_T]) -> tuple[_T, ...]:
        value = self.metadata.get(key)
        if not isinstance(value, tuple) or (value and type(value[0]) is not kind):  # all elements have one type
            raise self._mismatch(key, f"an array, each element {_KIND_NAMES[kind]}", value)
        return cast(tuple[_T, ...], value)

    def _mismatch(self, key: str, wanted: str, value: Value | None) -> LoadError:
        return self.error(f"metadata {key}", f"must be {wanted}, but {_described(value)}")


def _described(value: Value | None) -> str:
    if value is None:
        return "is missing"
    if isinstance(value, tuple):
        return f"is an array of {len(value)}" + (f" × {type(value[0]).__name__}" if value else "")
    return f"is {str(value)[:40]!r}"


def read_header(path: Path) -> GGUFHeader:
    """The header of the file at `path`, with every tensor checked to lie inside the file.

    Raises LoadError naming the file, the field and the cause.
    """
    with _open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes < len(_MAGIC):
            raise LoadError(f"{path.name}: file: has {size_bytes} bytes, too few for a GGUF header")
        # Only the part that a header may fill is mapped: the reader also runs under a limit on address space.
        with mmap.mmap(file.fileno(), min(size_bytes, MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
            return parse_header(data, size_bytes, path.name)


def parse_header(data: Buffer, file_bytes: int, name: str) -> GGUFHeader:
    """Parse the first bytes of a file of `file_bytes` bytes; `data` needs to hold only the header."""
    cursor = _Cursor(data, file_bytes, name)
    version = _read_version(cursor)
    num_tensors = cursor.count("number of tensors", MAX_TENSORS)
    num_keys = cursor.count("number of metadata keys", MAX_KEYS)
    metadata = _read_metadata(cursor, num_keys)
    alignment = _alignment(cursor, metadata)
    listed = [_read_tensor(cursor, index) for index in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(_placed(cursor, tensor, data_start, alignment, file_bytes) for tensor in listed)
    _refuse_overlap(cursor, tensors)
    return GGUFHeader(name, version, metadata, tensors)


class _Cursor:
    """A position in the header; each read says what it reads, for the error's text."""

    def __init__(self, data: Buffer, file_bytes: int, name: str) -> None:
        self.position = 0
        self._data = data
        self._end = len(data)
        self._file_bytes = file_bytes
        self._name = name
        self._elements_left = MAX_ARRAY_ELEMENTS

    def error(self, what: str, cause: str) -> LoadError:
        return LoadError(f"{self._name}: {what}: {cause}")

    def take(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` that must be there; returns where they start."""
        start = self.position
        if num_bytes > self._end - start:
            if self._end < self._file_bytes:
                raise self.error(what, f"the header is longer than {MAX_HEADER_BYTES} bytes, the most that is read")
            raise self.error(what, f"needs {num_bytes} bytes at {start}, but the file ends at {self._end}: truncated?")
        self.position = start + num_bytes
        return start

    def numbers(self, code: str, count: int, what: str) -> tuple[Scalar, ...]:
        layout = f"<{count}{code}"
        start = self.take(struct.calcsize(layout), what)
        return struct.unpack_from(layout, self._data, start)

    def uint32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self._data, self.take(4, what))[0])

    def uint64(self, what: str) -> int:
        return int(_LENGTH.unpack_from(self._data, self.take(8, what))[0])

    def count(self, what: str, limit: int) -> int:
        value = self.uint64(what)
        if value > limit:
            raise self.error(what, f"is {value}, more than the {limit} that are allowed")
        return value

    def string(self, what: str) -> str:
        num_bytes = self.count(f"{what}, length", MAX_STRING_BYTES)
        start = self.take(num_bytes, what)
        try:
            return str(self._data[start : start + num_bytes], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(what, f"is not UTF-8 ({error.reason} at byte {error.start})") from error

    def array_length(self, what: str) -> int:
        value = self.count(f"{what}, number of elements", self._elements_left)
        self._elements_left -= value
        return value


def _open_regular(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise LoadError(f"{path.name}: file: is not a regular file")
        return path.open("rb")
    except OSError as error:
        raise LoadError(f"{path.name}: file: cannot be opened: {error.strerror}") from error


def _read_version(cursor: _Cursor) -> int:
    magic = bytes(cast(tuple[int, ...], cursor.numbers("B", len(_MAGIC), "magic")))
    if magic != _MAGIC:
        raise cursor.error("magic", f"is {magic!r}, not {_MAGIC!r}: this is not a GGUF file")
    version = cursor.uint32("version")
    if version and version & 0xFFFF == 0:
        raise cursor.error("version", "the file is big endian, which is not supported")
    if version not in (2, 3):
        raise cursor.error("version", f"{version} is not supported (2 and 3 are); convert the file anew")
    return version


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(num_keys):
        key = cursor.string(f"metadata key {index}")
        if key in metadata:
            raise cursor.error(f"metadata {key[:80]!r}", "is there twice")
        metadata[key] = _read_value(cursor, f"metadata {key[:80]!r}")
    return metadata


def _read_value(cursor: _Cursor, what: str) -> Value:
    kind = cursor.uint32(f"{what}, type")
    if kind == _ARRAY:
        element_kind = cursor.uint32(f"{what}, type of elements")
        if element_kind == _ARRAY:
            raise cursor.error(what, "is an array of arrays, which is not supported")
        return _read_scalars(cursor, element_kind, cursor.array_length(what), what)
    return _read_scalars(cursor, kind, 1, what)[0]


def _read_scalars(cursor: _Cursor, kind: int, count: int, what: str) -> tuple[Scalar, ...]:
    if kind == _STRING:
        return tuple([cursor.string(what) for _ in range(count)])
    code = _NUMBERS.get(kind)
    if code is None:
        raise cursor.error(what, f"has the unknown value type {kind}")
    values = cursor.numbers(code, count, what)
    return _booleans(cursor, values, what) if kind == _BOOL else values


def _booleans(cursor: _Cursor, values: tuple[Scalar, ...], what: str) -> tuple[bool, ...]:
    wrong = next((value for value in values if value not in (0, 1)), None)
    if wrong is not None:
        raise cursor.error(what, f"a boolean must be 0 or 1, not {wrong}")
    return tuple(value == 1 for value in values)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment.bit_count() != 1:
        raise cursor.error("metadata general.alignment", f"must be a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _read_tensor(cursor: _Cursor, index: int) -> TensorInfo:
    """One entry of the directory; its offset is still relative to the data section."""
    name = cursor.string(f"name of tensor {index}")
    what = f"tensor {name[:80]!r}"
    num_dimensions = cursor.uint32(f"{what}, number of dimensions")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(what, f"has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.uint64(f"{what}, shape") for _ in range(num_dimensions))[::-1]
    kind = GGML_TYPES.get(type_id := cursor.uint32(f"{what}, type"))
    if kind is None:
        raise cursor.error(what, f"has the unknown element type {type_id}")
    if 0 in shape or shape[-1] % kind.block_size:
        raise cursor.error(what, f"shape {shape} is not possible for {kind.name} (blocks of {kind.block_size})")
    num_bytes = prod(shape) // kind.block_size * kind.block_bytes
    return TensorInfo(name, shape, kind, cursor.uint64(f"{what}, offset"), num_bytes)


def _placed(cursor: _Cursor, tensor: TensorInfo, data_start: int, alignment: int, file_bytes: int) -> TensorInfo:
    if tensor.offset_bytes % alignment:
        raise cursor.error(
            f"tensor {tensor.name[:80]!r}", f"offset {tensor.offset_bytes} is not a multiple of {alignment}"
        )
    offset_bytes = data_start + tensor.offset_bytes
    end = offset_bytes + tensor.num_bytes
    if end > file_bytes:
        raise cursor.error(
            f"tensor {tensor.name[:80]!r}", f"ends at byte {end}, but the file has {file_bytes}: truncated?"
        )
    return replace(tensor, offset_bytes=offset_bytes)


def _refuse_overlap(cursor: _Cursor, tensors: Sequence[TensorInfo]) -> None:
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise cursor.error("tensors", "one name is there twice")
    ordered = sorted(tensors, key=lambda tensor: tensor.offset_bytes)
    for before, after in pairwise(ordered):
        if before.offset_bytes + before.num_bytes > after.offset_bytes:
            raise cursor.error(f"tensor {after.name[:80]!r}", f"overlaps tensor {before.name[:80]!r}")
