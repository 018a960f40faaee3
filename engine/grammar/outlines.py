"""outlines-core: everything becomes one regex, and the regex an automaton over tokens, built ahead."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from inferd.engine.grammar.base import CannotExpress, Matcher, Row
from inferd.engine.grammar.rules import (
    alone,
    closed,
    declared,
    first_refusal,
    formats,
    only,
    schemas_of,
    typed,
    values_of_type,
    whole_regex,
)
from inferd.engine.grammar.schema import Node, Refusal
from inferd.engine.grammar.spec import GrammarKind, StructuredOutput
from inferd.engine.grammar.vocabulary import Vocabulary, set_bits

if TYPE_CHECKING:
    import outlines_core

_ANYTHING = "an automaton for any JSON takes outlines-core minutes to build; describe the values"
END = "\x00"
"""A character behind every text, which no other token may hold, and what the ends of sequence stand for: the library
forgets most ways on from a state in which a text may end, so a text ends only here. Where a class of characters takes
this one too, nothing ends by it."""
MAX_ROLLBACK = 256  # tokens; as far back as a draft can reach, and more
_KEYWORDS = [
    "type",
    "enum",
    "const",
    "$ref",
    "anyOf",
    "allOf",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "format",
]
_FORMATS = ("date", "uuid")


class OutlinesBackend:
    """Implements `GrammarBackend`. Schemas that refer to themselves are unrolled a few times."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import outlines_core

        self._library = outlines_core
        self._token_vocabulary = vocabulary
        ids: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            if token is not None and END.encode() not in token:
                ids.setdefault(token, []).append(token_id)
        ids[END.encode()] = list(vocabulary.eos_token_ids)
        self._vocabulary = outlines_core.Vocabulary(vocabulary.size, ids)

    @staticmethod
    def refusal(spec: StructuredOutput) -> str | None:
        if spec.kind in (GrammarKind.GRAMMAR, GrammarKind.STRUCTURAL_TAG):
            return f"{spec.kind.value}: outlines-core knows regular expressions only"
        if spec.kind is GrammarKind.JSON_OBJECT:
            return f"json_object: {_ANYTHING}"
        return first_refusal(
            schemas_of(spec),
            only(_KEYWORDS, "is not enforced by outlines-core"),
            alone("$ref", "anyOf", "allOf"),
            values_of_type,
            typed,
            declared,
            closed,
            formats(_FORMATS),
            _narrow,
        )

    def compile(self, spec: StructuredOutput) -> bytes:
        try:
            index = self._library.Index(f"(?:{_regex(self._library, spec)}){END}", self._vocabulary)
        except (ValueError, TypeError) as error:
            raise CannotExpress(str(error).splitlines()[0]) from error
        _, (binary,) = index.__reduce__()  # the library's own binary form, which only pickling otherwise reaches
        return bytes(binary)

    def load(self, spec: StructuredOutput, compiled: bytes) -> OutlinesCompiled:
        index = self._library.Index.from_binary(list(compiled))
        return OutlinesCompiled(index, self._token_vocabulary, len(compiled))


class OutlinesCompiled:
    """Implements `CompiledGrammar`."""

    def __init__(self, index: outlines_core.Index, vocabulary: Vocabulary, num_bytes: int) -> None:
        self._index = index
        self._vocabulary = vocabulary
        self.size_bytes = 4 * num_bytes  # hash maps where the binary form has arrays

    def make_matcher(self) -> Matcher:
        import outlines_core

        return OutlinesMatcher(outlines_core.Guide(self._index, MAX_ROLLBACK), self._index, self._vocabulary)


class OutlinesMatcher:
    """Implements `Matcher`. The guide never sees an end of sequence: it could not be taken back."""

    def __init__(self, guide: outlines_core.Guide, index: outlines_core.Index, vocabulary: Vocabulary) -> None:
        self._guide = guide
        self._index = index
        self._eos_token_ids = vocabulary.eos_token_ids
        self._terminated = False

    def accept(self, token_id: int) -> bool:
        if self._terminated:
            return False
        if token_id in self._eos_token_ids:
            self._terminated = self.is_completed()
            return self._terminated
        if not self._guide.accepts_tokens([token_id]):
            return False
        self._guide.advance(token_id, False)
        return True

    def fill_bitmask(self, row: Row) -> None:
        row.fill(0)
        self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)
        set_bits(row, self._eos_token_ids, self.is_completed())

    def rollback(self, num_tokens: int) -> None:
        if self._terminated and num_tokens:
            self._terminated = False
            num_tokens -= 1
        if num_tokens:
            self._guide.rollback_state(num_tokens)

    def is_terminated(self) -> bool:
        return self._terminated

    def is_completed(self) -> bool:
        end = self._index.get_next_state(self._guide.get_state(), self._eos_token_ids[0])
        return end is not None and bool(self._index.is_final_state(end))


def _regex(library: Any, spec: StructuredOutput) -> str:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return str(library.json_schema.build_regex_from_schema(spec.source))
        case GrammarKind.CHOICE:
            return "|".join(f"(?:{re.escape(choice)})" for choice in json.loads(spec.source))
        case _:
            return whole_regex(spec.source)


def _narrow(node: Node) -> Refusal | None:
    """What the library turns into a wrong regex."""
    schema = node.schema
    if len(schema.get("allOf", ())) > 1:
        return Refusal("allOf", node.where, "with several schemas is not enforced by outlines-core")
    for name in schema.get("properties", {}):
        if json.dumps(name, ensure_ascii=False) != f'"{name}"':
            return Refusal("properties", node.where, f"outlines-core cannot write the name {name[:40]!r}")
    if "prefixItems" in schema and (schema.get("items") or "minItems" in schema or "maxItems" in schema):
        return Refusal("prefixItems", node.where, "outlines-core does not count items behind them")
    if not node.keywords or _is_any(schema, "object", ("properties", "additionalProperties")):
        return Refusal("type", node.where, _ANYTHING)
    if _is_any(schema, "array", ("items", "prefixItems")):
        return Refusal("type", node.where, _ANYTHING)
    if "format" in schema and node.keywords - {"type", "format"}:
        return Refusal("format", node.where, "cannot stand beside another keyword")
    return None


def _is_any(schema: dict[str, Any], name: str, described_by: tuple[str, ...]) -> bool:
    """Whether the schema takes objects, or arrays, with anything in them."""
    given = schema.get("type", ())
    takes = name == given or (isinstance(given, list) and name in given)
    return takes and not any(keyword in schema for keyword in (*described_by, "enum", "const"))
