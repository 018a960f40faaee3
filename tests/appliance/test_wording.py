"""Errors about a body speak of its fields, not of the library that read it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inferd.appliance.api.openai.schemas import ChatRequest
from inferd.appliance.api.wording import in_plain_words

GOOD = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    name: str


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"model": "m"}, "messages is missing", "messages"),
        (GOOD | {"messages": [{"content": "x"}]}, "messages[0].role is missing", "messages[0].role"),
        (GOOD | {"messages": {}}, "messages must be a list, not an object", "messages"),
        (GOOD | {"temperature": "hot"}, "temperature must be a number, not a string", "temperature"),
        (GOOD | {"max_tokens": True}, "max_tokens must be a whole number, not a boolean", "max_tokens"),
        (GOOD | {"stop": 3}, "stop must be a string or a list, not a whole number", "stop"),
        (GOOD | {"stop": [3]}, "stop[0] must be a string, not a whole number", "stop[0]"),
        (GOOD | {"stream": None, "model": None}, "model must be a string, not null", "model"),
        (GOOD | {"logit_bias": {"5": "x"}}, "logit_bias[...] must be a number, not a string", "logit_bias[...]"),
    ],
)
def test_fields_of_a_chat(body: dict[str, Any], said: str, param: str) -> None:
    with pytest.raises(msgspec.ValidationError) as wrong:
        msgspec.convert(body, ChatRequest)
    assert in_plain_words(wrong.value) == (said, param)


def test_a_field_that_nobody_knows_and_a_body_that_is_none() -> None:
    with pytest.raises(msgspec.ValidationError) as wrong:
        msgspec.convert({"name": "x", "nmae": 1}, Strict)
    assert in_plain_words(wrong.value) == ("nmae is not a field that is known here", "nmae")
    with pytest.raises(msgspec.ValidationError) as wrong:
        msgspec.convert([], Strict)
    assert in_plain_words(wrong.value) == ("the body must be an object, not a list", None)
