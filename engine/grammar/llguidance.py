"""llguidance: regexes by derivatives inside an Earley parser, masks computed as they are needed. The fallback."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from inferd.engine.grammar.base import CannotExpress, Matcher, Row
from inferd.engine.grammar.rules import first_refusal, schemas_of, whole_regex
from inferd.engine.grammar.schema import Node, Refusal
from inferd.engine.grammar.spec import GrammarKind, StructuredOutput
from inferd.engine.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance

_UNTEXTUAL = b"\xff"  # what marks, in front, a token that is no text: this byte is in no UTF-8


class LLGuidanceBackend:
    """Implements `GrammarBackend`. A grammar needs no compiling: building a matcher takes a millisecond."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._library = llguidance
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos_token_ids),
        )

    @staticmethod
    def refusal(spec: StructuredOutput) -> str | None:
        return first_refusal(schemas_of(spec), _no_count_of_properties)

    def compile(self, spec: StructuredOutput) -> bytes:
        """Only tries it, with the mask of the first token, which is the costliest."""
        compiled = self.load(spec, b"")
        compiled.make_matcher().fill_bitmask(_row(self._vocabulary))
        return b""

    def load(self, spec: StructuredOutput, compiled: bytes) -> LLGuidanceCompiled:
        """Raises `CannotExpress`, as `compile` does."""
        try:
            grammar = _grammar(self._library, spec)
        except ValueError as error:
            raise CannotExpress(_cause(str(error))) from error
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise CannotExpress(_cause(matcher.get_error()))
        return LLGuidanceCompiled(matcher, self._vocabulary, len(grammar))


class LLGuidanceCompiled:
    """Implements `CompiledGrammar`: a matcher that stays at the beginning, for others to be copied from."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, source_bytes: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        # The library gives no figure; parser tables are some tens of times the source, lexer states come on top.
        self.size_bytes = 64 * source_bytes + (1 << 16)

    def make_matcher(self) -> Matcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocabulary)


class LLGuidanceMatcher:
    """Implements `Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self._terminated = False

    def accept(self, token_id: int) -> bool:
        if self._terminated:
            return False
        if token_id in self._eos_token_ids:
            self._terminated = self._matcher.is_accepting()
            return self._terminated
        return self._matcher.validate_tokens([token_id]) == 1 and self._matcher.consume_token(token_id)

    def fill_bitmask(self, row: Row) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise ValueError(f"llguidance gave up: {_cause(self._matcher.get_error())}")

    def rollback(self, num_tokens: int) -> None:
        if self._terminated and num_tokens:
            self._terminated = False
            num_tokens -= 1
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise ValueError(f"llguidance cannot go back: {_cause(self._matcher.get_error())}")

    def is_terminated(self) -> bool:
        return self._terminated

    def is_completed(self) -> bool:
        return self._matcher.is_accepting()


class _Tokens:
    """The vocabulary in the form that llguidance's tokenizer wants."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens = [
            _UNTEXTUAL + b"%d" % token_id if token is None else token
            for token_id, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = [token_id for token_id, token in enumerate(vocabulary.tokens) if token is None]
        self._encode = vocabulary.encode
        self._ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token is not None}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """How the model would write it; or, where that adds something to the text, the longest token first."""
        data = text.encode()
        if self._encode is not None:
            token_ids = self._encode(text)
            if b"".join(self.tokens[token_id] for token_id in token_ids if token_id < len(self.tokens)) == data:
                return token_ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """A byte that no token begins with is left out."""
        token_ids, start = [], 0
        while start < len(data):
            lengths = range(min(self._longest, len(data) - start), 0, -1)
            length = next((length for length in lengths if data[start : start + length] in self._ids), 0)
            if length:
                token_ids.append(self._ids[data[start : start + length]])
            start += length or 1
        return token_ids


def _row(vocabulary: Vocabulary) -> Row:
    return np.zeros(vocabulary.num_words, np.int32)


def _grammar(library: Any, spec: StructuredOutput) -> str:
    make = library.LLMatcher
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return str(make.grammar_from_json_schema(spec.source))
        case GrammarKind.JSON_OBJECT:
            return str(make.grammar_from_json_schema('{"type": "object"}'))
        case GrammarKind.REGEX:
            return str(make.grammar_from_regex(whole_regex(spec.source)))
        case GrammarKind.CHOICE:
            alternatives = " | ".join(json.dumps(choice) for choice in json.loads(spec.source))
            return str(make.grammar_from_lark(f"start: {alternatives}"))
        case GrammarKind.GRAMMAR if spec.is_ebnf:
            return str(library.grammar_from("ebnf", spec.source))
        case GrammarKind.GRAMMAR:
            return str(make.grammar_from_lark(spec.source))
        case GrammarKind.STRUCTURAL_TAG:
            return _structural_tag(library, json.loads(spec.source))


def _structural_tag(library: Any, tag: dict[str, Any]) -> str:
    if "separator" in tag:
        return str(library.LLMatcher.grammar_from_lark(_exact_lark(tag)))
    tags = [
        library.StructTag(
            trigger=next(trigger for trigger in tag["triggers"] if structure["begin"].startswith(trigger)),
            begin=structure["begin"],
            grammar=structure["schema"],
            end=structure["end"],
        )
        for structure in tag["structures"]
    ]
    return str(library.StructTag.to_grammar(tags, assume_special=False))


def _exact_lark(tag: dict[str, Any]) -> str:
    """Structures and nothing around them, as a grammar with a rule for each."""
    rules = [
        f"tag_{index}: {json.dumps(structure['begin'])} schema_{index} {json.dumps(structure['end'])}\n"
        f"schema_{index}: %json {json.dumps(structure['schema'])}"
        for index, structure in enumerate(tag["structures"])
    ]
    repeat = "" if tag.get("once", False) else f" ({json.dumps(tag['separator'])} tag)*"
    prefix, suffix = (json.dumps(tag[name]) if name in tag else "" for name in ("prefix", "suffix"))
    start = f"start: {prefix} tag{repeat} {suffix}"
    if "or_schema" in tag:
        start += " | answer"
        rules.append(f"answer: %json {json.dumps(tag['or_schema'])}")
    return "\n".join([start, "tag: " + " | ".join(f"tag_{i}" for i in range(len(tag["structures"]))), *rules])


def _no_count_of_properties(node: Node) -> Refusal | None:
    """The same key may come twice, so fewer properties may be left than were counted."""
    count = node.schema.get("minProperties", 0)
    if count > len(set(node.schema.get("required", ()))):
        return Refusal("minProperties", node.where, "is not enforced beyond the number of required properties")
    return None


def _cause(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return "; ".join(lines)[:300] or "no reason given"
