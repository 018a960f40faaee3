"""What is no form at all is refused where it is written down, and the keyword is named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from inferd.engine.errors import InvalidRequest
from inferd.engine.grammar.schema import MAX_DEPTH
from inferd.engine.grammar.spec import MAX_SPEC_BYTES, StructuredOutput
from inferd.engine.params import SamplingParams

TAG = {"triggers": ["<a"], "structures": [{"begin": "<a>", "schema": {"type": "null"}, "end": "</a>"}]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "json_object": True}, "regex"),
        ({"regex": " "}, "regex is empty"),
        ({"regex": "a" * (MAX_SPEC_BYTES + 1)}, "64 KB"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["a", "a"]}, "twice"),
        ({"choice": [str(index) for index in range(20_000)]}, "10000"),
        ({"grammar": "anything"}, "root ::="),
        ({"json_schema": "{"}, "no JSON"),
        ({"json_schema": '{"minimum": NaN}'}, "NaN"),
        ({"json_schema": "{}"}, "allows anything"),
        ({"json_schema": "true"}, "allows anything"),
        ({"json_schema": "3"}, "must be an object"),
        ({"json_schema": {"type": 123}}, "type at #"),
        ({"json_schema": {"type": "text"}}, "type at #"),
        ({"json_schema": {"type": "object", "properties": {"a": {"minLength": -1}}}}, "minLength at #/properties/a"),
        ({"json_schema": {"type": "object", "required": "a"}}, "required at #"),
        ({"json_schema": {"type": "array", "items": [{"type": "null"}]}}, "#/items"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength at #"),
        ({"json_schema": {"enum": []}}, "enum at #"),
        ({"json_schema": {"multipleOf": 0}}, "multipleOf at #"),
        ({"json_schema": {"type": "string", "nullable": True}}, "nullable"),
        ({"json_schema": {"$ref": "https://example.org/it"}}, r"\$ref"),
        ({"json_schema": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}}, "without end"),
        ({"json_schema": nested(MAX_DEPTH + 1)}, "deep"),
        ({"json_schema": "[" * 100_000}, "deeply|64 KB|no JSON"),
        ({"structural_tag": {**TAG, "triggers": []}}, "triggers"),
        ({"structural_tag": {**TAG, "triggers": ["<b"]}}, "triggers"),
        ({"structural_tag": {"triggers": ["<a"], "structures": [{"begin": "<a>"}]}}, r"structures\[0\]"),
        ({"regex": "\ud800"}, "surrogate"),
    ],
)
def test_refused(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest, match=names) as raised:
        StructuredOutput(**fields)
    assert raised.value.param == "structured_output"


def test_what_is_fine() -> None:
    schema = {"type": "object", "properties": {"z": {"title": "t", "type": "null"}, "a": {"x-y": 1, "type": "null"}}}
    spec = StructuredOutput(json_schema=schema)  # type: ignore[arg-type]
    assert list(json.loads(spec.source)["properties"]) == ["z", "a"]
    assert StructuredOutput(json_schema=nested(MAX_DEPTH)).kind.value == "json_schema"  # type: ignore[arg-type]
    assert StructuredOutput(grammar='root ::= "a"').is_ebnf
    assert not StructuredOutput(grammar='start: "a"').is_ebnf
    assert StructuredOutput(json_schema={"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}})  # type: ignore[arg-type]


def test_it_crosses_to_the_engine_and_is_checked_again() -> None:
    params = SamplingParams(structured_output=StructuredOutput(structural_tag=TAG, reasoning=(7, 8)))  # type: ignore[arg-type]
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    forged = msgspec.msgpack.encode({"structured_output": {"regex": "a", "choice": ["b"]}})
    with pytest.raises(msgspec.ValidationError, match="exactly one"):
        msgspec.msgpack.decode(forged, type=SamplingParams)


def test_equal_forms_share_a_key() -> None:
    one, other = StructuredOutput(regex="a", reasoning=(1, 2)), StructuredOutput(regex="a")
    assert one.key == other.key
    assert StructuredOutput(choice=["a"]).key != one.key
