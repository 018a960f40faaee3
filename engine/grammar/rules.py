"""Which schemas a backend can enforce: rules that look at one subschema after the other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from inferd.engine.grammar.schema import OF_TYPE, Node, Refusal, is_of_type, walk
from inferd.engine.grammar.spec import GrammarKind, StructuredOutput

Rule = Callable[[Node], Refusal | None]


def schemas_of(spec: StructuredOutput) -> list[Any]:
    """Every JSON schema that a spec holds."""
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return [json.loads(spec.source)]
    if spec.kind is GrammarKind.STRUCTURAL_TAG:
        tag = json.loads(spec.source)
        own = [tag["or_schema"]] if "or_schema" in tag else []
        return own + [structure["schema"] for structure in tag["structures"]]
    return []


def first_refusal(schemas: Iterable[Any], *rules: Rule) -> str | None:
    for schema in schemas:
        for node in walk(schema):
            for rule in rules:
                refusal = rule(node)
                if refusal is not None:
                    return str(refusal)
    return None


def only(keywords: Iterable[str], why: str) -> Rule:
    """Refuses every other keyword."""
    allowed = frozenset(keywords)

    def rule(node: Node) -> Refusal | None:
        for keyword in node.schema:
            if keyword in node.keywords and keyword not in allowed:
                return Refusal(keyword, node.where, why)
        return None

    return rule


def alone(*keywords: str) -> Rule:
    """Refuses any other constraint beside one of these, for libraries that would look at one of the two only."""

    def rule(node: Node) -> Refusal | None:
        for keyword in keywords:
            if keyword in node.schema and len(node.keywords) > 1:
                other = next(name for name in node.schema if name in node.keywords and name != keyword)
                return Refusal(keyword, node.where, f"cannot stand beside {other}")
        return None

    return rule


def values_of_type(node: Node) -> Refusal | None:
    """`enum` and `const` beside `type` alone, and of that type."""
    for keyword in ("enum", "const"):
        if keyword not in node.schema:
            continue
        others = node.keywords - {keyword, "type"}
        if others:
            return Refusal(keyword, node.where, f"cannot stand beside {min(others)}")
        values = node.schema["enum"] if keyword == "enum" else [node.schema["const"]]
        types = node.types
        if types and not all(any(is_of_type(value, name) for name in types) for value in values):
            return Refusal(keyword, node.where, "has a value that is not of the type beside it")
    return None


def typed(node: Node) -> Refusal | None:
    """A keyword that speaks of one type needs that `type` beside it."""
    for name, keywords in OF_TYPE.items():
        if name == "integer":
            continue
        kinds = {name, "integer"} if name == "number" else {name}
        for keyword in keywords:
            if keyword in node.schema and not kinds & set(node.types):
                return Refusal(keyword, node.where, f"needs type {name} beside it")
    return None


def declared(node: Node) -> Refusal | None:
    """What `required` names stands among `properties`."""
    for name in node.schema.get("required", ()):
        if name not in node.schema.get("properties", {}):
            return Refusal("required", node.where, f"names {name[:40]!r}, which is not among properties")
    return None


def whole_pattern(node: Node) -> Refusal | None:
    """A pattern that says where a text begins and ends; other ones may match anywhere inside it."""
    pattern = node.schema.get("pattern")
    if pattern is None:
        return None
    if not is_anchored(pattern):
        return Refusal("pattern", node.where, "must begin with ^ and end with $, around all alternatives")
    return None


def whole_regex(pattern: str) -> str:
    """A regex is always for the whole output, so anchors around it say nothing; some libraries know none."""
    return pattern[1:-1] if is_anchored(pattern) else pattern


def is_anchored(pattern: str) -> bool:
    body = pattern[1:-1]
    if not (pattern.startswith("^") and pattern.endswith("$")) or re.search(r"(?:^|[^\\])(?:\\\\)*\\$", body):
        return False
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "_", body)  # without escapes and character classes
    depth = 0
    for character in bare:
        depth += (character == "(") - (character == ")")
        if character in "^$" or (character == "|" and depth == 0):
            return False
    return True


def formats(known: Iterable[str]) -> Rule:
    names = frozenset(known)

    def rule(node: Node) -> Refusal | None:
        if "format" in node.schema and node.schema["format"] not in names:
            return Refusal("format", node.where, f"{str(node.schema['format'])[:40]!r} is not known")
        return None

    return rule


def closed(node: Node) -> Refusal | None:
    """Additional properties only where no property is declared: one could come under a declared name spelled anew."""
    if node.schema.get("properties") and node.schema.get("additionalProperties", False) is not False:
        return Refusal("additionalProperties", node.where, "cannot be kept apart from the declared properties")
    return None
