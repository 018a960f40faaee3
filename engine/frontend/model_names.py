"""Models by name. The engine knows folders alone; who keeps models under names may say so by an entry point."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from inferd.engine.errors import LoadError

GROUP = "inferd.model_names"


def model_folder(model: str | Path) -> Path:
    """`model` itself where it is a folder, else the folder of the model that is called so.

    An entry point of the group `inferd.model_names` is a function from a name to a folder, or None for a name that it
    does not know. Raises `LoadError`, and what such a function raises.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if isinstance(model, str):
        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
            folder = point.load()(model)
            if folder is not None:
                return Path(folder)
    raise LoadError(
        f"{model} is neither a model folder nor the name of a model here; `inferd ls` lists the names of the library, "
        "and `inferd show NAME --path` says which folder one has"
    )
