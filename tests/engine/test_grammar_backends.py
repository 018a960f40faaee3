"""Every grammar backend: what it takes on, it holds to; what it cannot hold to, it refuses by name."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from inferd.engine.grammar.backends import make_backend, refusal
from inferd.engine.grammar.base import CannotExpress, CompiledGrammar, GrammarBackend, Matcher
from inferd.engine.grammar.rules import is_anchored
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.grammar.vocabulary import Vocabulary
from inferd.engine.testing.grammar import EOS_ID, allowed_ids, byte_vocabulary, feed, random_output

NAMES = ("xgrammar", "llguidance", "outlines", "lm-format-enforcer")
FULL = ("xgrammar", "llguidance")  # those that know grammars
NULL: dict[str, Any] = {"type": "null"}

SCHEMAS: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "length": {"type": "string", "minLength": 2, "maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[^b]{1,3}$"},
    "free pattern": {"type": "string", "pattern": "ab"},
    "length and pattern": {"type": "string", "minLength": 3, "pattern": "^a"},
    "date": {"type": "string", "format": "date"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "range": {"type": "integer", "minimum": -17, "maximum": 105},
    "fractions": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 0.25},
    "multiple": {"type": "integer", "multipleOf": 7},
    "enum": {"enum": ['a"b\n', 1, None, 1.5, True]},
    "words": {"type": "string", "enum": ["ab", "abc", "b"]},
    "const": {"const": {"a": [1, {"b": None}]}},
    "types": {"type": ["string", "null"]},
    "object": {"type": "object"},
    "map": {"type": "object", "additionalProperties": NULL},
    "properties": {"type": "object", "properties": {"a": {"type": "integer"}, "b": NULL}, "required": ["b"]},
    "closed": {"type": "object", "properties": {"a": NULL}, "additionalProperties": False},
    "open": {"type": "object", "properties": {"a": NULL}, "additionalProperties": True},
    "names": {"type": "object", "properties": {'a"b': NULL, "a.b": NULL}, "required": ['a"b']},
    "pattern properties": {"type": "object", "patternProperties": {"^x": NULL}, "additionalProperties": False},
    "array": {"type": "array"},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "empty": {"type": "array", "items": False},
    "tuple": {"type": "array", "prefixItems": [NULL, {"type": "boolean"}], "items": False, "minItems": 2},
    "any of": {"anyOf": [NULL, {"type": "object", "properties": {"x": NULL}, "required": ["x"]}]},
    "one of": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]} for name in ("first", "second")
        ]
    },
    "all of": {"allOf": [{"type": "object", "properties": {"a": NULL}, "required": ["a"]}, {"required": ["a"]}]},
    "reference": {"$ref": "#/$defs/it", "$defs": {"it": NULL}},
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": NULL, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["value"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "annotated": {"type": "string", "title": "t", "description": "d", "default": "q", "x-order": 3},
}
SEEDS = 12


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return byte_vocabulary()


@pytest.fixture(scope="module")
def backends(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    return {name: make_backend(name, vocabulary) for name in NAMES}


def compiled(backend: GrammarBackend, **spec: Any) -> CompiledGrammar:
    form = StructuredOutput(**spec)
    return backend.load(form, backend.compile(form))


def matcher(backend: GrammarBackend, **spec: Any) -> Matcher:
    return compiled(backend, **spec).make_matcher()


def random_outputs(grammar: CompiledGrammar, vocabulary: Vocabulary, num_seeds: int) -> list[bytes]:
    """Those that are over in time."""
    outputs = [random_output(grammar.make_matcher(), vocabulary, random.Random(seed)) for seed in range(num_seeds)]
    return [output for output in outputs if output is not None]


def can_express(backends: dict[str, GrammarBackend], name: str, spec: StructuredOutput) -> bool:
    if refusal(name, spec) is not None:
        return False
    try:
        backends[name].compile(spec)
    except CannotExpress:
        return False
    return True


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_taken_on_is_held_to(
    backends: dict[str, GrammarBackend], vocabulary: Vocabulary, name: str, schema: str
) -> None:
    spec = StructuredOutput(json_schema=json.dumps(SCHEMAS[schema]))
    if not can_express(backends, name, spec):
        assert name != "llguidance", "the last backend to be asked takes on all of these"
        return
    outputs = random_outputs(compiled(backends[name], json_schema=spec.json_schema), vocabulary, SEEDS)
    assert outputs
    for output in outputs:
        jsonschema.validate(json.loads(output.decode()), SCHEMAS[schema])


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "items": NULL, "uniqueItems": True}),
        ("not", {"not": NULL}),
        ("if", {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
        ("contains", {"type": "array", "contains": NULL}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("format", {"type": "string", "format": "zodiac"}),
        ("minProperties", {"type": "object", "minProperties": 2}),
    ],
)
def test_what_nobody_can_hold_to_is_refused(
    backends: dict[str, GrammarBackend], keyword: str, schema: dict[str, Any]
) -> None:
    spec = StructuredOutput(json_schema=json.dumps(schema))
    for name in NAMES:
        reason = refusal(name, spec)
        if reason is None:
            with pytest.raises(CannotExpress) as raised:
                backends[name].compile(spec)
            reason = str(raised.value)
        assert keyword in reason


@pytest.mark.parametrize("name", ["xgrammar", "llguidance", "lm-format-enforcer"])
def test_any_object(backends: dict[str, GrammarBackend], vocabulary: Vocabulary, name: str) -> None:
    outputs = random_outputs(compiled(backends[name], json_object=True), vocabulary, 9)
    assert outputs
    assert all(isinstance(json.loads(output.decode()), dict) for output in outputs)


@pytest.mark.parametrize("pattern", ["(ab|[0-9]{2,4}\n|[^a-z]{1,2}!)x?", "^(a|b)(,b)?$"])
@pytest.mark.parametrize("name", NAMES)
def test_regex(backends: dict[str, GrammarBackend], vocabulary: Vocabulary, name: str, pattern: str) -> None:
    outputs = random_outputs(compiled(backends[name], regex=pattern), vocabulary, 20)
    assert len(outputs) == 20
    assert all(re.fullmatch(pattern, output.decode()) for output in outputs)


@pytest.mark.parametrize("name", NAMES)
def test_choice(backends: dict[str, GrammarBackend], vocabulary: Vocabulary, name: str) -> None:
    choice = ["yes", "no", 'a "quoted" (one).*', "两\n行", "yes, but"]
    if name == "lm-format-enforcer":  # the vocabulary has those characters only in parts
        with pytest.raises(CannotExpress, match=r"行|两"):
            compiled(backends[name], choice=choice)
        choice.remove("两\n行")
    outputs = random_outputs(compiled(backends[name], choice=choice), vocabulary, 150)
    assert set(outputs) == {text.encode() for text in choice}


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize(
    "grammar",
    ['root ::= "(" root ")" | "x" ("," "y")*', 'start: "(" start ")" | "x" ("," "y")*'],
    ids=["ebnf", "lark"],
)
def test_grammar(backends: dict[str, GrammarBackend], vocabulary: Vocabulary, name: str, grammar: str) -> None:
    for text, num_taken in ((b"((x,y))", 7), (b"(x]", 2), (b"x,,", 2), (b")", 0)):
        assert feed(matcher(backends[name], grammar=grammar), text) == num_taken
    nested = matcher(backends[name], grammar=grammar)
    assert feed(nested, b"((x)") == 4
    assert EOS_ID not in allowed_ids(nested, vocabulary)


@pytest.mark.parametrize("name", ["outlines", "lm-format-enforcer"])
def test_grammars_are_not_for_all(name: str) -> None:
    assert "grammar" in str(refusal(name, StructuredOutput(grammar='root ::= "x"')))


@pytest.mark.parametrize("name", FULL)
def test_structural_tag(backends: dict[str, GrammarBackend], vocabulary: Vocabulary, name: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tag = {
        "triggers": ["<call"],
        "structures": [{"begin": f"<call={letter}>", "schema": schema, "end": "</call>"} for letter in "ab"],
    }
    text = b'free < text <call=b>{"n": 12}</call> and more'
    fed = matcher(backends[name], structural_tag=tag)
    assert feed(fed, text) == len(text)
    assert EOS_ID in allowed_ids(fed, vocabulary)
    assert feed(matcher(backends[name], structural_tag=tag), b'<call=b>{"n": "') == 14
    assert feed(matcher(backends[name], structural_tag=tag), b"<call=c>") == 6
    inside = matcher(backends[name], structural_tag=tag)
    feed(inside, b'<call=a>{"n": 1')
    assert EOS_ID not in allowed_ids(inside, vocabulary)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize(
    "spec",
    [dict(regex="("), dict(regex="[z-a]"), dict(grammar='root ::= "a" ('), dict(grammar="start: missing_rule")],
)
def test_what_is_no_grammar_is_refused(backends: dict[str, GrammarBackend], name: str, spec: dict[str, Any]) -> None:
    with pytest.raises(CannotExpress, match=r"\w"):
        backends[name].compile(StructuredOutput(**spec))


@pytest.mark.parametrize("name", NAMES)
def test_no_halves_of_characters(backends: dict[str, GrammarBackend], name: str) -> None:
    """ED A0 BD is half of a surrogate pair: it stands in no UTF-8, and decoders make three characters of it."""
    assert feed(matcher(backends[name], regex="[^b]{1,3}"), b"\xed\xa0\xbd") <= 1
    assert feed(matcher(backends[name], regex="[^b]{1,3}"), "\ud7ff".encode()) in (0, 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_end_can_be_taken_back(backends: dict[str, GrammarBackend], name: str) -> None:
    fed = matcher(backends[name], regex="ab?")
    assert not fed.accept(EOS_ID)
    assert fed.accept(ord("a"))
    assert fed.accept(EOS_ID)
    assert fed.is_terminated()
    fed.rollback(1)
    assert not fed.is_terminated()
    assert fed.accept(ord("b"))
    fed.rollback(2)
    assert feed(fed, b"ab") == 2


@pytest.mark.parametrize(
    ("pattern", "anchored"),
    [
        ("^a+$", True),
        ("^(a|b)$", True),
        ("^[|$^]$", True),
        ("^a|b$", False),
        ("^a", False),
        ("a$", False),
        (r"^a\$", False),
        (r"^a\\$", True),
        ("^a$|^b$", False),
    ],
)
def test_anchored_patterns(pattern: str, anchored: bool) -> None:
    assert is_anchored(pattern) is anchored
