"""Writes safetensors without holding a tensor in memory; the library's own writer wants them all at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferd.engine.errors import LoadError


@dataclass(frozen=True)
class Source:
    """A tensor to be written; `dtype` in safetensors' words ("BF16"), `read` gives its bytes in row-major order."""

    dtype: str
    element_bytes: int
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[], Iterable[bytes]]


def write_safetensors(path: Path, tensors: Mapping[str, Source]) -> None:
    """Layout: https://huggingface.co/docs/safetensors. Raises LoadError if a source gives too few or too many bytes."""
    # Wide elements first keep every tensor aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_bytes, item[0]))
    with path.open("wb") as file:
        file.write(_header(ordered))
        for name, tensor in ordered:
            start = file.tell()
            for chunk in tensor.read():
                file.write(chunk)
            if (written := file.tell() - start) != tensor.num_bytes:
                raise LoadError(f"tensor {name}: has {written} bytes instead of {tensor.num_bytes}")


def _header(ordered: Iterable[tuple[str, Source]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.num_bytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
