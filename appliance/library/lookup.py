"""The library's names for the engine, which finds this by the entry point group `inferd.model_names`."""

from __future__ import annotations

from pathlib import Path

from inferd.appliance.library.errors import LibraryError
from inferd.appliance.library.library import DATABASE_NAME, Library
from inferd.appliance.settings import SettingsError, load_settings
from inferd.engine.errors import ConfigError


def folder_of(name: str) -> Path | None:
    """The folder of the model with that id or alias, in the home that this process's settings name.

    Makes no library where there is none. Raises `ConfigError`.
    """
    try:
        home = load_settings().home
        if not (home / DATABASE_NAME).is_file():
            return None
        with Library.open(home) as library:
            model = library.id_of(name)
            return None if model is None else library.folder(library.find(model))
    except (LibraryError, SettingsError) as error:
        raise ConfigError(f"the library cannot say where {name} is: {error}") from error
