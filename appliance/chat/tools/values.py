"""Arguments that models write as plain text between tags, as JSON: what the tool's schema says decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inferd.appliance.chat.tools.json_text import quoted

_WORDS = {"True": "true", "False": "false", "None": "null"}  # what models write that have seen much Python
_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "array": list,
    "null": type(None),
}


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON types that the schema names for an argument; empty when it says nothing that can be told at a glance."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return frozenset()
    alternatives = [schema, *(entry for key in ("anyOf", "oneOf") for entry in _list(schema.get(key)))]
    found: set[str] = set()
    for entry in alternatives:
        if isinstance(entry, dict):
            kind = entry.get("type")
            found.update(item for item in (kind if isinstance(kind, list) else [kind]) if isinstance(item, str))
            values = [*_list(entry.get("enum")), *([entry["const"]] if "const" in entry else [])]
            if kind is None:
                found.update(name for value in values for name in _KINDS if _is(value, name))
    return frozenset(found)


def is_text(types: frozenset[str]) -> bool:
    """Whether a value is a string whatever it looks like, so that it can be passed on while it comes."""
    return types == {"string"}


def as_json(text: str, types: frozenset[str]) -> str:
    """The value that a text stands for: of one of the types if it can be, else a string."""
    plain = text.strip()
    plain = _WORDS.get(plain, plain) if "string" not in types or "null" in types or "boolean" in types else plain
    try:
        value = json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    wanted = [name for name in types if name != "string"]
    if types and not any(_is(value, name) for name in wanted) and "string" in types:
        return quoted(text)
    return plain


def _is(value: Any, name: str) -> bool:
    kind = _KINDS.get(name)
    return kind is not None and isinstance(value, kind) and (not isinstance(value, bool) or name == "boolean")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
