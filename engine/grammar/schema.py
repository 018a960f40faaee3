"""JSON schemas as data: what is well formed, what the keywords mean to us, and a walk over all subschemas.

Formats are held to their syntax alone: "2023-02-31" is a date. Keywords that say nothing about which values are valid
are passed over; every other one must be known here, so that none is ever ignored unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from inferd.engine.errors import InvalidRequest, NotSupported

MAX_DEPTH = 32
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$schema",
        "$id",
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "strict",
    ]
)
DEFINITIONS = ("$defs", "definitions")

# The keywords that speak of values of one type only.
OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
    ),
    "array": (
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
    ),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
OF_TYPE["integer"] = OF_TYPE["number"]
APPLICATORS = ("anyOf", "oneOf", "allOf", "not", "if", "then", "else")


@dataclass(frozen=True)
class Node:
    """One subschema; `where` is its JSON pointer. Booleans are given as objects: True as {}, False as {"not": {}}."""

    where: str
    schema: dict[str, Any]

    @property
    def keywords(self) -> frozenset[str]:
        """Those that constrain a value."""
        return frozenset(key for key in self.schema if not is_annotation(key) and key not in DEFINITIONS)

    @property
    def types(self) -> tuple[str, ...]:
        given = self.schema.get("type", ())
        return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True)
class Refusal:
    """Why something cannot be enforced: the keyword to name, where it stands, and what is the matter with it."""

    keyword: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.keyword} at {self.where}: {self.why}"


def is_annotation(keyword: str) -> bool:
    return keyword in ANNOTATIONS or keyword.startswith("x-")


def check_schema(schema: Any) -> None:
    """Raises `InvalidRequest`, or `NotSupported` for a keyword that nobody here knows; both name keyword and place."""
    nodes = {node.where: node for node in walk(schema)}
    for node in nodes.values():
        for keyword, value in node.schema.items():
            if is_annotation(keyword):
                continue
            check = _CHECKS.get(keyword)
            if check is None:
                raise NotSupported(
                    f"the schema keyword {keyword[:60]!r} at {node.where} is not supported; leave it out",
                    param="structured_output",
                )
            problem = check(value)
            if problem is not None:
                raise _wrong(f"{keyword} at {node.where} {problem}")
        _check_bounds(node)
        if "$ref" in node.schema:
            _check_reference(nodes, node)


def walk(schema: Any) -> Iterator[Node]:
    """All subschemas, definitions included. Raises `InvalidRequest` for what is no schema or too deep."""
    pending: list[tuple[str, Any, int]] = [("#", schema, 1)]
    while pending:
        where, value, depth = pending.pop()
        if isinstance(value, bool):
            yield Node(where, {} if value else {"not": {}})
            continue
        if not isinstance(value, dict):
            raise _wrong(f"a schema must be an object, at {where} stands {str(value)[:40]!r}")
        if depth > MAX_DEPTH:
            raise _wrong(f"the schema is nested more than {MAX_DEPTH} deep at {where}")
        yield Node(where, value)
        pending.extend((f"{where}/{name}", child, depth + 1) for name, child in reversed(list(_children(value))))


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            yield from ((f"{keyword}/{_escaped(name)}", child) for name, child in value.items())
        elif keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
            yield from ((f"{keyword}/{index}", child) for index, child in enumerate(value))
        elif keyword in _SCHEMAS and not (value is False and keyword in _CLOSING):
            yield keyword, value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_SCHEMAS = frozenset(
    [
        "additionalProperties",
        "propertyNames",
        "items",
        "contains",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_CLOSING = ("additionalProperties", "items", "unevaluatedItems", "unevaluatedProperties")  # where false is no schema
_LISTS_OF_SCHEMAS = frozenset(("prefixItems", "anyOf", "oneOf", "allOf"))
_MAPS_OF_SCHEMAS = frozenset(("properties", "patternProperties", "dependentSchemas", *DEFINITIONS))


def _check_reference(nodes: dict[str, Node], node: Node) -> None:
    """A chain of references must come to a schema that says something itself."""
    seen: set[str] = set()
    here = node
    while (reference := here.schema.get("$ref")) is not None:
        if reference in seen:
            raise _wrong(f"$ref at {node.where}: {reference[:80]!r} refers to itself without end")
        seen.add(reference)
        if reference != "#" and not reference.startswith("#/"):
            raise _wrong(f"$ref at {node.where}: only references inside the schema can be followed, #/...")
        if reference not in nodes:
            raise _wrong(f"$ref at {node.where}: {reference[:80]!r} is no schema here")
        here = nodes[reference]


def _check_bounds(node: Node) -> None:
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        if node.schema.get(low, 0) > node.schema.get(high, math.inf):
            raise _wrong(f"{low} at {node.where} is above {high}: no value can have this form")


# What a keyword's value must be; a check returns what is wrong with it.
_Check = Callable[[Any], str | None]


def _must(text: str, holds: Callable[[Any], bool]) -> _Check:
    return lambda value: None if holds(value) else f"must be {text}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_SCHEMA: _Check = _must("a schema", lambda value: isinstance(value, dict | bool))
_NUMBER: _Check = _must("a number", _is_number)
_COUNT: _Check = _must("a whole number, 0 or more", _is_count)
_TEXT: _Check = _must("a string", lambda value: isinstance(value, str))
_MAP: _Check = _must("an object", lambda value: isinstance(value, dict))
_LIST: _Check = _must("a list of one or more schemas", lambda value: isinstance(value, list) and bool(value))

_CHECKS: dict[str, _Check] = {
    "type": _must(f"one of {', '.join(TYPES)}, or a list of them", _is_type),
    "enum": _must("a list of one or more values", lambda value: isinstance(value, list) and bool(value)),
    "const": lambda _: None,
    "$ref": _TEXT,
    "required": _must("a list of names", _is_names),
    "dependentRequired": _MAP,
    "uniqueItems": _must("true or false", lambda value: isinstance(value, bool)),
    "multipleOf": _must("a number above 0", lambda value: _is_number(value) and value > 0),
    "pattern": _TEXT,
    "format": _TEXT,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(_SCHEMAS, _SCHEMA),
    **dict.fromkeys(_LISTS_OF_SCHEMAS, _LIST),
    **dict.fromkeys(_MAPS_OF_SCHEMAS, _MAP),
}


def is_of_type(value: Any, name: str) -> bool:
    """Whether a JSON value has a schema type; 1.0 is an integer, and True is no number."""
    if name == "number":
        return _is_number(value)
    if name == "integer":
        return _is_number(value) and float(value).is_integer()
    kinds: dict[str, type] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[name])


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="structured_output")
