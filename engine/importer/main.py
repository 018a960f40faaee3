"""The import child: a GGUF file's metadata → the JSON files of a model folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferd.engine.errors import LoadError
from inferd.engine.importer import sandbox
from inferd.engine.importer.model_files import config_json, generation_config_json
from inferd.engine.importer.quantisation import quantisation_of
from inferd.engine.importer.tokenizer_files import build_tokenizer, tokenizer_config_json
from inferd.engine.importer.vocabulary import read_vocabulary
from inferd.engine.loader.gguf_header import read_header
from inferd.engine.loader.gguf_names import architecture_of
from inferd.engine.model_config import read_model_config


def main(arguments: Sequence[str]) -> int:
    """Prints one JSON line; returns the process's exit status."""
    sandbox.confine()
    source, folder = (Path(argument) for argument in arguments)
    return sandbox.report(lambda: import_file(source, folder))


def import_file(source: Path, folder: Path) -> dict[str, str | None]:
    """What was found out on the way: "quantisation".

    Raises LoadError naming the file, the field and the cause; then `folder` has no config.json of this import.
    """
    header = read_header(source)
    architecture = architecture_of(header)
    vocabulary = read_vocabulary(header)
    config = config_json(header, architecture, vocabulary, source)
    _write(folder / "tokenizer.json", build_tokenizer(header, vocabulary).to_str())
    _write_json(folder / "tokenizer_config.json", tokenizer_config_json(header, vocabulary))
    _write_json(folder / "generation_config.json", generation_config_json(vocabulary))
    _write_json(folder / "config.json", config)
    try:
        read_model_config(folder)
    except LoadError:
        (folder / "config.json").unlink()
        raise
    return {"quantisation": quantisation_of(header)}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(partial, flags, 0o644), "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)
