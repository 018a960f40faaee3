"""The ways in which clients ask for a form of the answer, as one value.

OpenAI's `response_format`; vLLM's `structured_outputs` and, before it, one `guided_*` field a kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from inferd.appliance.api.openai.schemas import GenerationRequest
from inferd.engine.errors import InvalidRequest, NotSupported
from inferd.engine.grammar.spec import FIELD, StructuredOutput

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


def structured_output(ask: GenerationRequest) -> StructuredOutput | None:
    """Raises `InvalidRequest`."""
    given = _given(ask)
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} cannot be asked for together; send one", param=next(iter(given)))
    for name, form in given.items():
        with blamed_on(name):
            return StructuredOutput(**form)
    return None


def field_of(ask: GenerationRequest) -> str:
    """The field in which the client asked for a form."""
    return next(iter(_given(ask)), FIELD)


@contextmanager
def blamed_on(field: str) -> Iterator[None]:
    """What is wrong with the form is said of the client's own field."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != FIELD:
            raise
        raise type(error)(f"{field}: {error}", param=field, code=error.code) from error


def _given(ask: GenerationRequest) -> dict[str, dict[str, Any]]:
    """Fields of `StructuredOutput` by the client's field."""
    found: dict[str, dict[str, Any]] = {}
    if ask.response_format is not None:
        form = _response_format(ask.response_format)
        if form is not None:
            found["response_format"] = form
    if ask.structured_outputs is not None:
        found["structured_outputs"] = _structured_outputs(ask.structured_outputs)
    for name, kind in _GUIDED.items():
        value = getattr(ask, name)
        if value is not None:
            found[name] = {kind: value}
    return found


def _response_format(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    match asked.get("type"):
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            described = asked.get("json_schema")
            if not isinstance(described, dict) or "schema" not in described:
                raise InvalidRequest("response_format.json_schema.schema is missing", param="response_format")
            return {"json_schema": described["schema"]}
        case "structural_tag":
            return {"structural_tag": {key: value for key, value in asked.items() if key != "type"}}
        case other:
            raise NotSupported(
                f"response_format: type {str(other)[:40]!r} is not supported; there are text, json_object, json_schema "
                "and structural_tag",
                param="response_format",
            )


def _structured_outputs(asked: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in asked.items() if value not in (None, False)}
    for name in given:
        if name not in _STRUCTURED:
            known = ", ".join(_STRUCTURED)
            raise NotSupported(
                f"structured_outputs: {name[:40]!r} is not supported; there are {known}", param="structured_outputs"
            )
    return {_STRUCTURED[name]: value for name, value in given.items()}
