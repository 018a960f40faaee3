"""xgrammar: context-free grammars over bytes, masks computed ahead. The default."""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

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
    whole_pattern,
    whole_regex,
)
from inferd.engine.grammar.schema import Node, Refusal
from inferd.engine.grammar.spec import GrammarKind, StructuredOutput
from inferd.engine.grammar.vocabulary import Vocabulary, is_set, pack_bits

if TYPE_CHECKING:
    import xgrammar

MAX_THREADS = 8
_FORMATS = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "uri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
]
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
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
]


class XGrammarBackend:
    """Implements `GrammarBackend`. Objects get no properties beyond the declared ones unless the schema allows them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._library = xgrammar
        self._vocabulary = vocabulary
        self._bytes = _TokenBytes(vocabulary)
        self._tokenizer = xgrammar.TokenizerInfo(
            [token or b"" for token in vocabulary.tokens],
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )

    @staticmethod
    def refusal(spec: StructuredOutput) -> str | None:
        return first_refusal(
            schemas_of(spec),
            only(_KEYWORDS, "is not enforced by xgrammar"),
            alone("$ref", "anyOf", "allOf"),
            _one_of_all,
            values_of_type,
            typed,
            declared,
            closed,
            whole_pattern,
            formats(_FORMATS),
            _one_string_rule,
        )

    def compile(self, spec: StructuredOutput) -> bytes:
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        compiler = self._library.GrammarCompiler(self._tokenizer, max_threads=threads, cache_enabled=False)
        try:
            return _compile(compiler, spec).serialize_json().encode()
        except RuntimeError as error:
            raise CannotExpress(_cause(error)) from error

    def load(self, spec: StructuredOutput, compiled: bytes) -> XGrammarCompiled:
        grammar = self._library.CompiledGrammar.deserialize_json(compiled.decode(), self._tokenizer)
        return XGrammarCompiled(grammar, self._bytes)


class XGrammarCompiled:
    """Implements `CompiledGrammar`."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, token_bytes: _TokenBytes) -> None:
        self._grammar = grammar
        self._bytes = token_bytes
        self.size_bytes = int(grammar.memory_size_bytes)

    def make_matcher(self) -> Matcher:
        import xgrammar

        return XGrammarMatcher(xgrammar.GrammarMatcher(self._grammar), self._bytes)


class XGrammarMatcher:
    """Implements `Matcher`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, token_bytes: _TokenBytes) -> None:
        self._matcher = matcher
        self._bytes = token_bytes
        self._token_ids: list[int] = []

    def accept(self, token_id: int) -> bool:
        if self._matcher.is_terminated() or not is_set(self._bytes.after(self._token_ids), token_id):
            return False
        if not self._matcher.accept_token(token_id):
            return False
        self._token_ids.append(token_id)
        return True

    def fill_bitmask(self, row: Row) -> None:
        row.fill(-1)  # what stays untouched when every token is allowed
        self._matcher.fill_next_token_bitmask(row[None, :])
        np.bitwise_and(row, self._bytes.after(self._token_ids), out=row)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        del self._token_ids[len(self._token_ids) - num_tokens :]

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def is_completed(self) -> bool:
        return bool(self._matcher.is_completed())


class _TokenBytes:
    """Keeps halves of surrogate pairs out, which xgrammar takes for characters though no UTF-8 text has them.

    Their three bytes begin with ED and one of A0 to BF.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = [token or b"" for token in vocabulary.tokens]
        self._ends_in_ed = {token_id for token_id, text in enumerate(texts) if text.endswith(b"\xed")}
        known = [token is not None for token in vocabulary.tokens]
        for token_id in vocabulary.eos_token_ids:
            known[token_id] = True
        whole = [known[token_id] and not _has_surrogate(text) for token_id, text in enumerate(texts)]
        self._anywhere = pack_bits(whole)
        self._after_ed = pack_bits(
            [whole[token_id] and not 0xA0 <= (text[0] if text else 0) <= 0xBF for token_id, text in enumerate(texts)]
        )

    def after(self, token_ids: list[int]) -> Row:
        """The tokens that leave the text valid, packed as a bitmask."""
        return self._after_ed if token_ids and token_ids[-1] in self._ends_in_ed else self._anywhere


def _has_surrogate(text: bytes) -> bool:
    return any(first == 0xED and 0xA0 <= second <= 0xBF for first, second in itertools.pairwise(text))


def _compile(compiler: xgrammar.GrammarCompiler, spec: StructuredOutput) -> xgrammar.CompiledGrammar:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return compiler.compile_json_schema(spec.source)
        case GrammarKind.JSON_OBJECT:
            return compiler.compile_json_schema('{"type": "object"}')
        case GrammarKind.REGEX:
            return compiler.compile_regex(whole_regex(spec.source))
        case GrammarKind.CHOICE:
            alternatives = " | ".join(json.dumps(choice) for choice in json.loads(spec.source))
            return compiler.compile_grammar(f"root ::= {alternatives}")
        case GrammarKind.GRAMMAR if spec.is_ebnf:
            return compiler.compile_grammar(spec.source)
        case GrammarKind.GRAMMAR:
            return compiler.compile_lark(spec.source)
        case GrammarKind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(_structural_tag(json.loads(spec.source)))


def _structural_tag(tag: dict[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"]},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    if "separator" in tag:
        return {"type": "structural_tag", "format": _exact_format(tag, tags)}
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags},
    }


def _exact_format(tag: dict[str, Any], tags: list[dict[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": tag["separator"],
        "at_least_one": True,
        "stop_after_first": tag.get("once", False),
    }
    texts = {name: {"type": "const_string", "value": tag[name]} for name in ("prefix", "suffix") if name in tag}
    if texts:
        elements = (texts.get("prefix"), body, texts.get("suffix"))
        body = {"type": "sequence", "elements": [element for element in elements if element is not None]}
    if "or_schema" in tag:
        body = {"type": "or", "elements": [{"type": "json_schema", "json_schema": tag["or_schema"]}, body]}
    return body


def _one_of_all(node: Node) -> Refusal | None:
    if len(node.schema.get("allOf", ())) > 1:
        return Refusal("allOf", node.where, "with several schemas is not enforced by xgrammar")
    return None


def _one_string_rule(node: Node) -> Refusal | None:
    if "pattern" in node.schema and "format" in node.schema:
        return Refusal("pattern", node.where, "cannot stand beside format")
    return None


def _cause(error: RuntimeError) -> str:
    """Without the place in the library's own source."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text.split(": ", 1)[1] if text.startswith("[") and ": " in text else text
