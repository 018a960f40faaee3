"""Old checkpoints (`.bin`, `.pt`, `.pth`) → safetensors, in a confined child that never runs what they contain.

`convert_folder` is the parent's side; `python -P -m inferd.engine.convert SOURCE FOLDER` is the child. No torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from inferd.engine.errors import LoadError
from inferd.engine.importer import sandbox
from inferd.engine.importer.run import run_child
from inferd.engine.importer.safetensors_writer import Source, write_safetensors
from inferd.engine.importer.torch_archive import TorchArchive
from inferd.engine.model_config import read_json

CONVERT_TIMEOUT_S = 3600.0
SUFFIXES = (".bin", ".pt", ".pth")
_INDEX = "pytorch_model.bin.index.json"
_SHARD_NAME = re.compile(r"[A-Za-z0-9._-]+\.bin")
_ADAPTER = "adapter_model"  # names the weights of an adapter
_COPIED = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# What trainers leave beside the weights.
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")


def convert_folder(source: Path, folder: Path, timeout_s: float = CONVERT_TIMEOUT_S) -> None:
    """Makes the model folder `folder` from a checkpoint file or a folder that holds one, with its JSON files; also an
    adapter's folder.

    `folder` appears complete or not at all. Blocks; safe in any thread. Raises LoadError with the child's message.
    """
    if folder.exists() and not folder.is_dir():
        raise LoadError(f"{folder} is no folder: name a new one")
    if folder.exists() and any(folder.iterdir()):
        raise LoadError(f"{folder} is not empty: name a new folder")
    partial_folder = folder.absolute().with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial_folder.mkdir()
        run_child("inferd.engine.convert", [str(source.absolute()), str(partial_folder)], str(source), timeout_s)
        partial_folder.rename(folder)
    except OSError as error:
        raise LoadError(f"{folder} cannot be made in {folder.parent}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Prints one JSON line; returns the process's exit status."""
    sandbox.confine(cpu_s=int(CONVERT_TIMEOUT_S))
    source, folder = (Path(argument) for argument in arguments)
    return sandbox.report(lambda: convert(source, folder))


def convert(source: Path, folder: Path) -> None:
    """Raises LoadError naming the file and the cause."""
    if source.is_dir():
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    if (source / _INDEX).is_file():
        _convert_shards(source, folder)
    else:
        checkpoint = _single_checkpoint(source)
        name = _ADAPTER if checkpoint.stem == _ADAPTER else "model"
        _convert_file(checkpoint, folder / f"{name}.safetensors")


def _single_checkpoint(source: Path) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        raise LoadError(f"{source} is neither a checkpoint nor a folder")
    found = sorted(
        path
        for path in source.iterdir()
        if path.suffix in SUFFIXES and path.is_file() and not _NO_WEIGHTS.fullmatch(path.name)
    )
    if len(found) == 1:
        return found[0]
    if not found:
        raise LoadError(f"{source} holds no checkpoint ({', '.join(SUFFIXES)})")
    names = ", ".join(path.name for path in found[:4])
    raise LoadError(f"{source} holds {len(found)} checkpoints and no {_INDEX}; name one of them: {names}")


def _convert_shards(source: Path, folder: Path) -> None:
    shards = _listed_shards(source)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, (shard, listed) in enumerate(shards.items(), start=1):
        target = f"model-{number:05}-of-{len(shards):05}.safetensors"
        sizes = _convert_file(source / shard, folder / target)
        if missing := listed - sizes.keys():
            raise LoadError(f"{shard}: lacks {min(missing)}, which {_INDEX} expects in it")
        if twice := sizes.keys() & weight_map.keys():
            raise LoadError(f"{shard}: holds {min(twice)}, and so does another shard")
        weight_map |= dict.fromkeys(sizes, target)
        total_bytes += sum(sizes.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _listed_shards(source: Path) -> dict[str, set[str]]:
    """Tensor names by shard, from the index."""
    weight_map = read_json(source / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{_INDEX}: has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise LoadError(f"{_INDEX}: {str(shard)[:80]!r} is not the name of a shard")
        shards.setdefault(shard, set()).add(tensor)
    return dict(sorted(shards.items()))


def _convert_file(checkpoint: Path, target: Path) -> dict[str, int]:
    """Bytes of each tensor by its name."""
    with TorchArchive(checkpoint) as archive:
        tensors = archive.tensors()
        sources = {
            name: Source(
                dtype=tensor.storage.type.safetensors_name,
                element_bytes=tensor.storage.type.num_bytes,
                shape=tensor.shape,
                num_bytes=tensor.num_bytes,
                read=partial(archive.read, tensor),
            )
            for name, tensor in tensors.items()
        }
        write_safetensors(target, sources)
    return {name: tensor.num_bytes for name, tensor in tensors.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
