"""Structured output over HTTP: every way to ask for a form, and refusals before the first byte of an answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")

Daemon = Any  # the conftest's; test folders are no packages
SECRETS = re.compile(r"(^|[^:/\w])/(\w+/)+|0x[0-9a-f]{4}|Traceback|\.(py|cc)\b")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "tame": {"type": "boolean"}},
    "required": ["kind", "tame"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"type": "null"}, "uniqueItems": True}
ENOUGH = 400  # tokens: the scripted engine likes blanks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(
    run_daemon_in_module: Any, tmp_path_factory: pytest.TempPathFactory, short_run_dir: Any
) -> AsyncIterator[Daemon]:
    async with run_daemon_in_module(tmp_path_factory.mktemp("daemon"), short_run_dir) as running:
        yield running


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}}


async def texts(daemon: Daemon, fields: dict[str, Any]) -> list[str]:
    """Of a chat and a completion, whole and streamed; asserts that these two are the same."""
    found = []
    for ask, path in ((daemon.chat, "message"), (daemon.complete, "text")):
        whole = await ask("an animal", max_tokens=ENOUGH, **fields)
        assert whole.status_code == 200, whole.text
        (choice,) = whole.json()["choices"]
        assert choice["finish_reason"] == "stop"
        text = choice["message"]["content"] if path == "message" else choice["text"]
        streamed = await ask("an animal", max_tokens=ENOUGH, stream=True, **fields)
        blocks = [block[6:] for block in streamed.text.split("\n\n") if block.startswith("data: {")]
        pieces = [choice for block in blocks for choice in json.loads(block)["choices"]]
        joined = "".join(piece.get("text") or piece.get("delta", {}).get("content") or "" for piece in pieces)
        assert joined == text
        found.append(text)
    return found


@pytest.mark.parametrize(
    "fields",
    [json_schema(SCHEMA), {"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}],
    ids=["response_format", "guided", "structured_outputs"],
)
async def test_json_schema(daemon: Daemon, fields: dict[str, Any]) -> None:
    for text in await texts(daemon, fields):
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
        ({"structured_outputs": {"choice": ["lion", "tiger"]}}, "lion|tiger"),
        ({"guided_choice": ["ja", "nein"]}, "ja|nein"),
        ({"guided_grammar": 'root ::= "(" "x"+ ")"'}, r"\(x+\)"),
        ({"structured_outputs": {"grammar": 'start: "<" /[xy]{2}/ ">"'}}, "<[xy]{2}>"),
    ],
)
async def test_other_forms(daemon: Daemon, fields: dict[str, Any], pattern: str) -> None:
    for text in await texts(daemon, fields):
        assert re.fullmatch(pattern, text)


async def test_openai_client_parses(daemon: Daemon) -> None:
    async with openai.AsyncOpenAI(base_url=f"{daemon.address}/v1", api_key="-", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=daemon.model,
            messages=[{"role": "user", "content": "an animal"}],
            response_format=json_schema(SCHEMA)["response_format"],
            max_tokens=ENOUGH,
        )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"kind", "tame"}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (json_schema({"type": 123}), "type"),
        (json_schema({}), "schema"),
        (json_schema(UNIQUE), "uniqueItems"),
        (json_schema({"type": "string", "format": "zodiac"}), "zodiac"),
        (json_schema({"type": "string", "flavour": "sweet"}), "flavour"),
        (json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "itself"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"guided_regex": "("}, "regex"),
        ({"guided_regex": ""}, "regex"),
        ({"guided_choice": []}, "choice"),
        ({"guided_grammar": "no rules"}, "root ::="),
        ({"guided_grammar": 'root ::= "a" ('}, "grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "together"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(daemon: Daemon, fields: dict[str, Any], names: str, stream: bool) -> None:
    (field,) = list(fields)[:1]
    for response in (await daemon.chat(stream=stream, **fields), await daemon.complete(stream=stream, **fields)):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == field
        assert names in error["message"]
        assert not SECRETS.search(error["message"]), error["message"]
    assert (await daemon.chat()).status_code == 200


async def test_many_poisons_leave_the_others_alone(daemon: Daemon) -> None:
    """Nothing here can be compiled in time or at all; plain chats are answered meanwhile, and the engine stays."""
    engine = (await daemon.llm()).ready.pid
    deep: Any = {"type": "null"}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    poisons: list[dict[str, Any]] = [
        {"guided_regex": "(" * 2000},
        {"guided_regex": "(a{1,1000}){1,1000}{1,1000}b"},
        json_schema(deep),
        {"guided_choice": [f"choice {index}" for index in range(20_000)]},
    ]
    asked = [asyncio.create_task(daemon.chat(max_tokens=2, **poison)) for poison in poisons]
    plain = [await daemon.chat() for _ in range(5)]
    answers: list[httpx.Response] = await asyncio.gather(*asked)
    assert [response.status_code for response in plain] == [200] * 5
    assert all(response.status_code in (200, 400) for response in answers)
    assert [answers[index].status_code for index in (0, 2, 3)] == [400] * 3
    assert (await daemon.llm()).ready.pid == engine
