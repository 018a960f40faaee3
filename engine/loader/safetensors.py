"""Safetensors checkpoints: one file, or shards with an index. Data only: nothing in them is ever run.

Headers are checked here before the library opens a file, so that a hostile one costs bounded memory and is named.
Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, tensor bytes).
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inferd.engine.errors import LoadError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 500_000  # per file; the largest published mixture of experts has about 140,000 in all
MAX_ENTRY_BYTES = 2000
MAX_DIMENSIONS = 16
COLONS_PER_TENSOR = 4  # its name and three fields
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_Count = Annotated[int, msgspec.Meta(ge=0)]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a header; offsets count from the end of the header."""

    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class Shard:
    """One file, and the tensors in it as its checked header lists them."""

    path: Path
    entries: Mapping[str, TensorEntry]


def iterate_safetensors(folder: Path) -> Iterator[tuple[str, Tensor, Path]]:
    """Every tensor of the checkpoint with its name and file; all headers are checked before the first comes.

    A tensor is a view of the mapped file: copy it before the next step. Raises LoadError.
    """
    for shard in read_shards(folder):
        yield from shard_tensors(shard)


def read_shards(folder: Path) -> list[Shard]:
    """The checkpoint's files with checked headers, the index against the shards. Raises LoadError.

    With an index, only files that it names count: a consolidated copy next to the shards is ignored.
    """
    if (folder / INDEX_NAME).exists():
        return _indexed_shards(folder)
    path = _single_file(folder)
    return [Shard(path, read_header(path))]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensor name → entry, in the order of the data. Raises LoadError unless the tensors fill the file exactly."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            raise LoadError(f"{path} is no regular file")
        file_bytes = found.st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > file_bytes - 8:
                raise LoadError(f"{path} is truncated or is no safetensors file: its header does not fit in the file")
            if header_bytes > MAX_HEADER_BYTES:
                raise LoadError(f"{path}: a header of {header_bytes} bytes is above the limit of {MAX_HEADER_BYTES}")
            raw = file.read(header_bytes)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    entries = _parse_header(raw, path)
    _check_layout(entries, file_bytes - 8 - header_bytes, path)
    return entries


def _parse_header(raw: bytes, path: Path) -> dict[str, TensorEntry]:
    if raw.count(b":") > MAX_TENSORS * COLONS_PER_TENSOR:  # counted before parsing, which takes much more memory
        raise LoadError(f"{path}: the header lists more than {MAX_TENSORS} tensors")
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        metadata = fields.pop("__metadata__", None)
        if metadata is not None:
            msgspec.json.decode(metadata, type=dict[str, str])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: the header is not what safetensors allows: {error}") from error
    entries = {name: _parse_entry(name, field, path) for name, field in fields.items()}
    return dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))


def _parse_entry(name: str, field: msgspec.Raw, path: Path) -> TensorEntry:
    if memoryview(field).nbytes > MAX_ENTRY_BYTES:
        raise LoadError(f"{path}: header entry of tensor {name} is longer than {MAX_ENTRY_BYTES} bytes")
    try:
        entry = msgspec.json.decode(field, type=TensorEntry)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: header entry of tensor {name}: {error}") from error
    if entry.dtype not in DTYPE_BITS:
        raise LoadError(f'{path}: tensor {name} has the unknown dtype "{entry.dtype}"')
    return entry


def _check_layout(entries: Mapping[str, TensorEntry], data_bytes: int, path: Path) -> None:
    """No overlap, no hole, nothing outside the file, and each tensor as long as its shape and dtype say."""
    position = 0
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            raise LoadError(f"{path}: tensor {name} lies at {begin}:{end}, expected to begin at {position}")
        if (end - begin) * 8 != math.prod(entry.shape) * DTYPE_BITS[entry.dtype]:
            raise LoadError(
                f"{path}: tensor {name} of shape {list(entry.shape)} and dtype {entry.dtype} "
                f"cannot have {end - begin} bytes"
            )
        position = end
    if position != data_bytes:
        state = "is truncated" if position > data_bytes else "has bytes that belong to no tensor"
        raise LoadError(f"{path} {state}: its header describes {position} bytes of tensors, the file has {data_bytes}")


def shard_tensors(shard: Shard) -> Iterator[tuple[str, Tensor, Path]]:
    """See `iterate_safetensors`."""
    try:
        with safe_open(shard.path, framework="pt", device="cpu") as file:
            for name in shard.entries:
                yield name, file.get_tensor(name), shard.path
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{shard.path} cannot be read: {error}") from error


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE_NAME).exists():
        return folder / SINGLE_NAME
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise LoadError(f"{folder} holds {len(found)} safetensors files but no {INDEX_NAME} that says which count")
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if pickled:
        raise LoadError(
            f"{folder} holds only pickled weights ({pickled[0]}), which could run code when loaded; "
            f"rewrite them first: inferd convert {folder}"
        )
    raise LoadError(f"{folder} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME}")


def _indexed_shards(folder: Path) -> list[Shard]:
    index_path = folder / INDEX_NAME
    weight_map = _read_index(index_path)
    shards = []
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        if Path(file_name).name != file_name or path.suffix != ".safetensors":
            raise LoadError(f'{index_path} names "{file_name}", which is no safetensors file of this folder')
        if not path.exists():
            raise LoadError(f"{path} is missing: {INDEX_NAME} names it")
        shard = Shard(path, read_header(path))
        _check_against_index(shard, weight_map)
        shards.append(shard)
    return shards


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise LoadError(f"{path} is above the limit of {MAX_HEADER_BYTES} bytes")
        weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} is no valid index: {error}") from error
    if not weight_map:
        raise LoadError(f"{path} names no tensors")
    return weight_map


def _check_against_index(shard: Shard, weight_map: Mapping[str, str]) -> None:
    for name, file_name in weight_map.items():
        if file_name == shard.path.name and name not in shard.entries:
            raise LoadError(f"tensor {name} is missing from {shard.path}, where {INDEX_NAME} puts it")
    for name in shard.entries:
        if weight_map.get(name) != shard.path.name:
            place = weight_map.get(name, "nowhere")
            raise LoadError(f"{shard.path} holds tensor {name}, but {INDEX_NAME} puts it in {place}")
