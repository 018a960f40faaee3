"""The engine's part of a pull: whether it serves a model, and the files that a GGUF does not bring along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inferd.appliance.library.errors import UnsupportedModel
from inferd.engine.config import ModelConfig
from inferd.engine.errors import EngineError


@dataclass(frozen=True)
class ModelImporter:
    """`import_gguf(file, folder)` writes config.json, tokenizer.json, … of a GGUF file into the folder, and returns how
    it is quantised, where it says so; `read_config(folder)` reads them. Both raise `EngineError` for what the engine
    does not serve.
    """

    import_gguf: Callable[[Path, Path], str | None]
    read_config: Callable[[Path], ModelConfig]

    def complete(self, gguf: Path, folder: Path) -> str | None:
        """Makes a model folder of a GGUF file; returns its quantisation. Raises `UnsupportedModel`."""
        try:
            return self.import_gguf(gguf, folder)
        except EngineError as error:
            raise UnsupportedModel(f"the GGUF file cannot be imported: {error}") from error

    def check(self, folder: Path) -> ModelConfig:
        """Raises `UnsupportedModel` with the engine's reason."""
        try:
            return self.read_config(folder)
        except EngineError as error:
            raise UnsupportedModel(str(error)) from error
