"""Which models this daemon can serve: those of the library, and a folder that the command line named."""

from __future__ import annotations

from pathlib import Path

from inferd.appliance.downloads.select import quantisation_of
from inferd.appliance.library.errors import ModelNotFound
from inferd.appliance.library.library import Library
from inferd.appliance.library.records import ModelRecord
from inferd.appliance.supervisor.errors import UnknownModel
from inferd.engine.model_config import read_model_config


class Catalog:
    def __init__(self, library: Library, folders: tuple[ModelRecord, ...] = ()) -> None:
        self._library = library
        self._folders = {record.id: record for record in folders}

    def list_models(self) -> list[ModelRecord]:
        known = [record for record in self._library.list_models() if record.id not in self._folders]
        return [*self._folders.values(), *known]

    def find(self, name: str) -> ModelRecord:
        """By id or alias. Raises `UnknownModel`."""
        if (record := self._folders.get(name)) is not None:
            return record
        try:
            return self._library.find(name)
        except ModelNotFound:
            raise UnknownModel(name, [record.id for record in self.list_models()]) from None

    def folder(self, record: ModelRecord) -> Path:
        return self._library.folder(record)


def record_of_folder(folder: Path) -> ModelRecord:
    """A record for a model folder that is served where it lies. Raises `LoadError`."""
    folder = folder.expanduser().absolute()
    config = read_model_config(folder)
    weights = [*folder.glob("*.gguf"), *folder.glob("*.safetensors")]
    return ModelRecord(
        id=folder.name.lower(),
        source=f"file:{folder}",
        revision=None,
        format="gguf" if any(path.suffix == ".gguf" for path in weights) else "safetensors",
        architecture=config.architecture,
        path=str(folder),
        size_bytes=sum(path.stat().st_size for path in weights),
        quantisation=next((quantisation_of(path.name) for path in weights if path.suffix == ".gguf"), None),
        context_limit=config.max_position,
        created_at=int((folder / "config.json").stat().st_mtime),
    )
