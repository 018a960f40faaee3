"""lm-format-enforcer: parsers that go character by character, walked along a tree of all tokens. Slow and patient."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from inferd.engine.grammar.base import CannotExpress, Matcher, Row
from inferd.engine.grammar.rules import (
    alone,
    closed,
    declared,
    first_refusal,
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
    from lmformatenforcer import CharacterLevelParser
    from lmformatenforcer.tokenizerprefixtree import TokenizerPrefixTree, TokenizerPrefixTreeNode

_KEYWORDS = [
    "type",
    "enum",
    "const",
    "$ref",
    "anyOf",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
]
_DIGITS = frozenset("0123456789")
_BEFORE_DIGIT = frozenset("-.")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class FormatEnforcerBackend:
    """Implements `GrammarBackend`. It goes by characters, so tokens that hold parts of one are never chosen."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        texts = [_text_of(token) for token in vocabulary.tokens]
        self._texts = texts
        self._tree = _tree({token_id: text for token_id, text in enumerate(texts) if text})
        # Its JSON parser would let control characters into strings, so JSON is written without tokens that have any.
        printable = {token_id: text for token_id, text in enumerate(texts) if text and not _CONTROL.search(text)}
        self._json_tree = _tree(printable)

    @staticmethod
    def refusal(spec: StructuredOutput) -> str | None:
        if spec.kind in (GrammarKind.GRAMMAR, GrammarKind.STRUCTURAL_TAG):
            return f"{spec.kind.value}: lm-format-enforcer knows JSON and regular expressions only"
        return first_refusal(
            schemas_of(spec),
            only(_KEYWORDS, "is not enforced by lm-format-enforcer"),
            alone("$ref", "anyOf"),
            values_of_type,
            typed,
            declared,
            closed,
            _narrow,
        )

    def compile(self, spec: StructuredOutput) -> bytes:
        """Only tries it, with the mask of the first token."""
        self.load(spec, b"").make_matcher().fill_bitmask(np.zeros(self._vocabulary.num_words, np.int32))
        return b""

    def load(self, spec: StructuredOutput, compiled: bytes) -> FormatEnforcerCompiled:
        """Raises `CannotExpress`, as `compile` does."""
        is_json = spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
        tree = self._json_tree if is_json else self._tree
        _check_characters(spec, tree)
        try:
            parser = _parser(spec, tree)
            if is_json:
                parser = _strict_json()(parser, '"integer"' in spec.source)
        except Exception as error:  # the library raises nothing narrower
            raise CannotExpress(f"lm-format-enforcer: {str(error) or type(error).__name__}") from error
        return FormatEnforcerCompiled(parser, tree, self._texts, self._vocabulary, len(spec.source))


class FormatEnforcerCompiled:
    """Implements `CompiledGrammar`. Parsers never change, so requests share the first one."""

    def __init__(
        self,
        parser: CharacterLevelParser,
        tree: TokenizerPrefixTree,
        texts: list[str],
        vocabulary: Vocabulary,
        source_bytes: int,
    ) -> None:
        self._parser = parser
        self._tree = tree
        self._texts = texts
        self._vocabulary = vocabulary
        self.size_bytes = 256 * source_bytes + (1 << 16)  # an object of Python per keyword

    def make_matcher(self) -> Matcher:
        return FormatEnforcerMatcher(self._parser, self._tree, self._texts, self._vocabulary)


class FormatEnforcerMatcher:
    """Implements `Matcher`; keeps the parser of every position, to go back to."""

    def __init__(
        self, parser: CharacterLevelParser, tree: TokenizerPrefixTree, texts: list[str], vocabulary: Vocabulary
    ) -> None:
        self._parsers = [parser]
        self._tree = tree
        self._texts = texts
        self._eos_token_ids = vocabulary.eos_token_ids
        self._terminated = False

    def accept(self, token_id: int) -> bool:
        if self._terminated:
            return False
        if token_id in self._eos_token_ids:
            self._terminated = self.is_completed()
            return self._terminated
        parser, text = self._parsers[-1], self._texts[token_id]
        if not text:
            return False
        for character in text:
            if character not in parser.get_allowed_characters():
                return False
            parser = parser.add_character(character)
        self._parsers.append(parser)
        return True

    def fill_bitmask(self, row: Row) -> None:
        row.fill(0)
        token_ids: list[int] = []
        parser = self._parsers[-1]
        self._collect(parser, self._tree.root, token_ids, parser.shortcut_key())
        set_bits(row, token_ids, True)
        set_bits(row, self._eos_token_ids, self.is_completed())

    def rollback(self, num_tokens: int) -> None:
        if self._terminated and num_tokens:
            self._terminated = False
            num_tokens -= 1
        if num_tokens:
            del self._parsers[len(self._parsers) - num_tokens :]

    def is_terminated(self) -> bool:
        return self._terminated

    def is_completed(self) -> bool:
        return bool(self._parsers[-1].can_end())

    def _collect(
        self, parser: CharacterLevelParser, node: TokenizerPrefixTreeNode, token_ids: list[int], shortcut: Any
    ) -> None:
        """Walk parser and tree together. Inside a free JSON string the tree has the tokens listed already."""
        token_ids.extend(node.tokens)
        characters = set(node.children).intersection(parser.get_allowed_characters())
        if isinstance(shortcut, tuple) and shortcut[0] == "json_freetext":
            _, length, low, high = shortcut
            cache = self._tree.json_freetext_tokens
            listed = cache.lookup_allowed_tokens(
                min(cache.max_token_len, max(0, low - length)), min(cache.max_token_len, high - length)
            )
            token_ids.extend(listed.allowed_tokens)
            characters &= {'"'}
        for character in characters:
            self._collect(parser.add_character(character), node.children[character], token_ids, None)


def _tree(texts: dict[int, str]) -> TokenizerPrefixTree:
    from lmformatenforcer.tokenizerprefixtree import TokenizerPrefixTree

    return TokenizerPrefixTree([(token_id, text, True) for token_id, text in texts.items()], False, len(texts))


def _text_of(token: bytes | None) -> str:
    """Empty for no text and for parts of a character."""
    try:
        return (token or b"").decode()
    except UnicodeDecodeError:
        return ""


def _check_characters(spec: StructuredOutput, tree: TokenizerPrefixTree) -> None:
    """What has to be written must have tokens, or an output could come to a place where no token may follow."""
    source = spec.source
    if spec.kind is not GrammarKind.REGEX and spec.kind is not GrammarKind.JSON_OBJECT:
        source = json.dumps(json.loads(source), ensure_ascii=False)  # without escapes of ordinary characters
    missing = sorted(set(source) - set(tree.root.children) - {"\n", "\t", "\r"})
    if missing and spec.kind is not GrammarKind.JSON_OBJECT:
        raise CannotExpress(f"lm-format-enforcer: no token of this model is the character {missing[0]!r}")


def _parser(spec: StructuredOutput, tree: TokenizerPrefixTree) -> CharacterLevelParser:
    from lmformatenforcer import JsonSchemaParser, RegexParser
    from lmformatenforcer.characterlevelparser import CharacterLevelParserConfig

    alphabet = "".join(character for character in tree.root.children if len(character) == 1)
    config = CharacterLevelParserConfig(alphabet=alphabet)
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return JsonSchemaParser(json.loads(spec.source), config)
        case GrammarKind.JSON_OBJECT:
            return JsonSchemaParser({"type": "object"}, config)
        case GrammarKind.CHOICE:
            return RegexParser("|".join(f"({re.escape(choice)})" for choice in json.loads(spec.source)), config)
        case _:
            return RegexParser(whole_regex(spec.source), config)


@functools.cache
def _strict_json() -> Callable[[CharacterLevelParser, bool], CharacterLevelParser]:
    """A parser around the library's, which lets objects end after a comma and numbers after a point or an exponent.

    Numbers get no exponents at all, since it would also give negative ones to integers; and no fractions beside
    integers, since it takes some of those for integers.
    """
    from lmformatenforcer import CharacterLevelParser

    class StrictJson(CharacterLevelParser):  # type: ignore[misc]  # the library has no types
        def __init__(
            self, inner: Any, whole: bool, in_string: bool = False, escaped: bool = False, last: str = ""
        ) -> None:
            self._inner, self._whole = inner, whole
            self._in_string, self._escaped, self._last = in_string, escaped, last

        def add_character(self, character: str) -> StrictJson:
            inner = self._inner.add_character(character)
            if self._in_string:
                closes = character == '"' and not self._escaped
                escaped = character == "\\" and not self._escaped
                return StrictJson(inner, self._whole, not closes, escaped, character)
            last = self._last if character.isspace() and self._last == "," else character
            return StrictJson(inner, self._whole, character == '"', False, last)

        def get_allowed_characters(self) -> str:
            allowed = str(self._inner.get_allowed_characters())
            if self._in_string:
                return allowed
            if self._last in _BEFORE_DIGIT:
                return "".join(character for character in allowed if character in _DIGITS)
            banned = "}" if self._last == "," else ""
            if self._last in _DIGITS:
                banned = "eE." if self._whole else "eE"
            return "".join(character for character in allowed if character not in banned)

        def can_end(self) -> bool:
            return bool(self._inner.can_end()) and self._last not in _BEFORE_DIGIT

        def shortcut_key(self) -> Any:
            return self._inner.shortcut_key()

    return StrictJson


def _narrow(node: Node) -> Refusal | None:
    """What the library gets wrong, or cannot read."""
    schema = node.schema
    if isinstance(schema.get("type"), list) and node.keywords != {"type"}:
        return Refusal("type", node.where, "lm-format-enforcer drops the other keywords of a list of types")
    if "$ref" in schema and not re.fullmatch(r"#/(\$defs|definitions)/[^/~%]+", schema["$ref"]):
        return Refusal("$ref", node.where, "lm-format-enforcer can only follow it to a definition")
    if "$defs" in schema and "definitions" in schema:
        return Refusal("definitions", node.where, "lm-format-enforcer looks at these or at $defs")
    if schema.get("items") is False or schema.get("maxItems") == 0:
        return Refusal("items", node.where, "lm-format-enforcer cannot write an array that must be empty")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not all(isinstance(value, str) and json.dumps(value, ensure_ascii=False) == f'"{value}"' for value in values):
        return Refusal("enum", node.where, "lm-format-enforcer can only write plain strings")
    if (
        "additionalProperties" in schema
        and "properties" not in schema
        and isinstance(schema["additionalProperties"], bool)
    ):
        return Refusal("additionalProperties", node.where, "lm-format-enforcer passes true and false over here")
    for name in schema.get("properties", {}):
        if json.dumps(name, ensure_ascii=False) != f'"{name}"':
            return Refusal("properties", node.where, f"lm-format-enforcer cannot write the name {name[:40]!r}")
    return None
