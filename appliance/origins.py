"""Who gave each setting its value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DEFAULT = "default"
OPTION = "option"
Tables = Mapping[str, Any]


def origins_of(
    keys: Iterable[tuple[str, str]], files: Mapping[Path, Tables], environment: Mapping[str, str], options: Tables
) -> dict[str, str]:
    """By key ("engine.dtype"): "option", "environment (VARIABLE)", or the file's path; a default has no entry.

    `keys` come with their variables. `files` are weakest first.
    """
    variables = {name.upper(): (name, value) for name, value in environment.items()}
    origins: dict[str, str] = {}
    parents: dict[str, str] = {}
    for key, variable in keys:
        parents[key] = variable
        if _holds(options, key):
            origins[key] = OPTION
        elif (name := _variable(key, parents, variables)) is not None:
            origins[key] = f"environment ({name})"
        elif (path := next((path for path in reversed(list(files)) if _holds(files[path], key)), None)) is not None:
            origins[key] = str(path)
    return origins


def _variable(key: str, names: Mapping[str, str], variables: Mapping[str, tuple[str, str]]) -> str | None:
    """The variable of the key itself, else one of a table around it, whose value is JSON."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        found = variables.get(names.get(".".join(parts[:length]), ""))
        if found is not None and (length == len(parts) or _holds(_parsed(found[1]), ".".join(parts[length:]))):
            return found[0]
    return None


def _parsed(text: str) -> Tables:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _holds(tables: Tables, key: str) -> bool:
    value: Any = tables
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True
