"""The tensors of a PEFT adapter folder: which matrices of the model they belong to, checked before anything is kept.

Data only: nothing in the files is ever run. What is read is bounded by the model's own shapes and the rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from inferd.engine.errors import LoadError, NotSupported
from inferd.engine.loader.safetensors import MAX_HEADER_BYTES, TensorEntry, read_header
from inferd.engine.lora.config import CONFIG_NAME, LINEARS, PICKLED_NAME, WEIGHTS_NAME, AdapterConfig

DTYPES = ("F32", "F16", "BF16")
_NAME = re.compile(r"base_model\.model\.(?P<matrix>.{1,200})\.lora_(?P<factor>[AB])\.weight")
_OTHER = {
    "lora_embedding_A": "an adapted embedding",
    "lora_embedding_B": "an adapted embedding",
    "lora_magnitude_vector": "use_dora",
    "modules_to_save": "modules_to_save",
}

MatrixShapes = Mapping[str, tuple[int, int]]  # name in the base model's checkpoint, without ".weight" → (out, in)


@dataclass(frozen=True)
class AdapterTensors:
    """As they are in the file, on the CPU."""

    digest: str  # of both files' bytes
    factors: dict[str, tuple[Tensor, Tensor]]  # matrix → A[rank, in], B[out, rank]


def read_adapter(folder: Path, config: AdapterConfig, shapes: MatrixShapes) -> AdapterTensors:
    """`shapes`: of the matrices that can be adapted.

    Raises LoadError or NotSupported naming the file, the tensor and what is wrong with it.
    """
    path = _weights_path(folder)
    entries = read_header(path)
    factors = _factors(entries, config, shapes, path)
    num_bytes = sum(end - begin for begin, end in (entry.data_offsets for entry in entries.values()))
    try:
        with path.open("rb") as file:
            data = file.read(8 + MAX_HEADER_BYTES + num_bytes)
        described = (folder / CONFIG_NAME).read_bytes()
        tensors = safetensors.torch.load(data)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {n: e.shape for n, e in entries.items()}:
        raise LoadError(f"{path} was changed while it was read; try again")
    digest = sha256(len(described).to_bytes(8, "little") + described + data).hexdigest()
    return AdapterTensors(digest, {matrix: (tensors[a], tensors[b]) for matrix, (a, b) in factors.items()})


def _weights_path(folder: Path) -> Path:
    path = folder / WEIGHTS_NAME
    if path.exists():
        return path
    if (folder / PICKLED_NAME).exists():
        raise LoadError(
            f"{folder} holds only pickled weights ({PICKLED_NAME}), which could run code when loaded; "
            f"rewrite them first: inferd convert {folder}"
        )
    raise LoadError(f"{folder} holds no weights: it has no {WEIGHTS_NAME}")


def _factors(
    entries: Mapping[str, TensorEntry], config: AdapterConfig, shapes: MatrixShapes, path: Path
) -> dict[str, tuple[str, str]]:
    """Matrix → the names of its A and its B."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        matrix, factor = _parse(name, shapes, path)
        num_out, num_in = shapes[matrix]
        expected = (config.rank, num_in) if factor == "A" else (num_out, config.rank)
        if entry.shape != expected:
            raise LoadError(f"{path}: tensor {name} has shape {list(entry.shape)}, expected {list(expected)}")
        if entry.dtype not in DTYPES:
            raise LoadError(f"{path}: tensor {name} holds {entry.dtype}; supported: {', '.join(DTYPES)}")
        found.setdefault(matrix, {})[factor] = name
    for matrix, names in found.items():
        if len(names) != 2:
            raise LoadError(f"{path}: {matrix} has only {', '.join(names.values())}, not both factors")
    if not found:
        raise LoadError(f"{path} holds no tensors")
    return {matrix: (names["A"], names["B"]) for matrix, names in found.items()}


def _parse(name: str, shapes: MatrixShapes, path: Path) -> tuple[str, str]:
    for part, what in _OTHER.items():
        if f".{part}" in name:
            raise NotSupported(f"{path}: tensor {name} needs {what}, which is not supported")
    match = _NAME.fullmatch(name)
    if match is None:
        raise LoadError(f"{path}: tensor {name:.200} is no factor of a plain low-rank adapter")
    matrix = match["matrix"]
    if matrix not in shapes:
        kind = matrix.rpartition(".")[2]
        if kind not in LINEARS:
            known = ", ".join(LINEARS)
            raise NotSupported(f"{path}: tensor {name} adapts {kind}, which is not supported; supported: {known}")
        raise LoadError(f"{path}: tensor {name} adapts {matrix}, which this model does not have")
    return matrix, match["factor"]
