"""Typed reads of a JSON file of a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferd.engine.errors import LoadError


class Fields:
    """Typed reads of one JSON object; errors name file and field."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def error(self, name: str, problem: str) -> LoadError:
        return LoadError(f'{self.path}, field "{name}": {problem}')

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.error(name, f"must be a positive whole number, got {value!r}")
        return value

    def optional_whole(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.error(name, f"must be a whole number, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.error(name, f"must be a positive number, got {value!r}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value
