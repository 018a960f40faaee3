"""What is wrong with a request is said in one shape, before any byte of a stream, and the server goes on."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")

Daemon = Any  # the conftest's; test folders are no packages
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
SECRETS = re.compile(r"(^|[^:/\w])/(\w+/)+|0x[0-9a-f]{4}|Traceback|INFERD_|\.py\b")
DEEP = 10_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(
    run_daemon_in_module: Any, tmp_path_factory: pytest.TempPathFactory, short_run_dir: Path
) -> AsyncIterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    async with run_daemon_in_module(folder, short_run_dir, body_limit_bytes=200_000) as running:
        engine = (await running.llm()).ready.pid
        yield running
        assert (await running.llm()).ready.pid == engine, "a request ended the engine"


async def check_refusal(
    daemon: Daemon, response: httpx.Response, status: int, code: str | None = None, param: str | None = None
) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    assert not SECRETS.search(error["message"].replace("/v1/", "")), error["message"]
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    assert (await daemon.chat()).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"model": "tiny", "messages": [',
        b"[]",
        b'"x"',
        b"5",
        b"null",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"model": "tiny", "model": "tiny"}',
        b'{"a": {"b": 1, "b": 2}}',
        b"[" * DEEP + b"]" * DEEP,
        b'{"model": "tiny", "x": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"x": ' * DEEP + b"1" + b"}" * DEEP,
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"seed": 9223372036854775808}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        rb'{"model": "\ud800"}',
        rb'{"model": "tiny", "messages": [{"role": "user", "content": "\uDC00"}]}',
    ],
    ids=lambda raw: repr(raw[:40]) if isinstance(raw, bytes) else None,
)
async def test_bodies_that_are_not_a_request(daemon: Daemon, path: str, raw: bytes) -> None:
    await check_refusal(daemon, await daemon.http.post(path, content=raw, headers=JSON), 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 300]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 2**31}, "n"),
        ({"n": "1"}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(token_id): 1 for token_id in range(301)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"repetition_detection": {"max_pattern_size": 0}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 4000, "min_count": 4000}}, "repetition_detection"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
    ],
)
async def test_fields_out_of_range(daemon: Daemon, fields: dict[str, Any], param: str) -> None:
    for response in (await daemon.chat(**fields), await daemon.complete(**fields)):
        await check_refusal(daemon, response, 400, param=param)


UNSUPPORTED: list[tuple[str, Any]] = [
    ("best_of", 4),
    ("use_beam_search", True),
    ("length_penalty", 0.5),
    ("prompt_embeds", "AAAA"),
    ("response_format", {"type": "yaml"}),
    ("structured_outputs", {"xml": "a+"}),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
async def test_what_is_known_and_not_built(daemon: Daemon, name: str, value: Any) -> None:
    for response in (await daemon.chat(**{name: value}), await daemon.complete(**{name: value})):
        await check_refusal(daemon, response, 400, "unsupported_value", name)
        assert name in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ x }}"),
        ("chat_template_kwargs", {"tokenize": True}),
        ("chat_template_kwargs", {"enable_thinking": "no"}),
        ("continue_final_message", True),
    ],
)
async def test_what_chat_knows_and_does_not_do(daemon: Daemon, name: str, value: Any) -> None:
    await check_refusal(daemon, await daemon.chat(**{name: value}), 400, "unsupported_value", name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
async def test_logprobs_of_chats_out_of_range(daemon: Daemon, fields: dict[str, Any], param: str) -> None:
    await check_refusal(daemon, await daemon.chat(**fields), 400, param=param)


@pytest.mark.parametrize("value", [True, 21, -1, "5"])
async def test_logprobs_of_completions_out_of_range(daemon: Daemon, value: Any) -> None:
    await check_refusal(daemon, await daemon.complete(logprobs=value), 400, param="logprobs")


async def test_completions_know_suffix_and_do_not_do_it(daemon: Daemon) -> None:
    await check_refusal(daemon, await daemon.complete(suffix="}"), 400, "unsupported_value", "suffix")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "hello",
        [3],
        [{"content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}],
        [{"role": "no such <role>", "content": "x"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "user", "content": "x"}] * 4097,
    ],
    ids=str,
)
async def test_messages_that_are_wrong(daemon: Daemon, messages: Any) -> None:
    response = await daemon.http.post(CHAT, json={"model": "tiny", "messages": messages})
    await check_refusal(daemon, response, 400)
    assert response.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], ["a", 1], [1, "a"], [1, [2]], [300], [-1], [2**40], [1.5], [True], [None], {}, ["x"] * 65, 7],
    ids=str,
)
async def test_prompts_that_are_wrong(daemon: Daemon, prompt: Any) -> None:
    response = await daemon.complete(prompt)
    await check_refusal(daemon, response, 400)
    assert response.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize("prompt", ["x" * 3000, [1] * 3000, ["x", "x" * 3000]], ids=["text", "ids", "one of two"])
async def test_prompts_that_are_too_long(daemon: Daemon, prompt: Any) -> None:
    for stream in (False, True):
        response = await daemon.complete(prompt, stream=stream)
        await check_refusal(daemon, response, 400, "context_length_exceeded", "prompt")


async def test_a_missing_field_is_named(daemon: Daemon) -> None:
    await check_refusal(daemon, await daemon.http.post(CHAT, json={"model": "tiny"}), 400, param="messages")
    await check_refusal(daemon, await daemon.http.post(COMPLETIONS, json={"prompt": "x"}), 400, param="model")


@pytest.mark.parametrize("fields", [{"temperature": 9}, {"n": 99}, {"model": "nope"}])
async def test_streams_are_refused_before_they_start(daemon: Daemon, fields: dict[str, Any]) -> None:
    response = await daemon.chat(stream=True, **fields)
    assert response.status_code in (400, 404)
    assert response.headers["content-type"] == "application/json"


async def test_too_large_a_body(daemon: Daemon) -> None:
    await check_refusal(daemon, await daemon.chat("x" * 300_000), 413, "request_too_large")


async def test_too_large_a_body_without_a_length(daemon: Daemon) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "'
        for _ in range(40):
            yield b"x" * 10_000

    response = await daemon.http.post(CHAT, content=pieces(), headers=JSON)
    await check_refusal(daemon, response, 413, "request_too_large")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {},
    ],
    ids=str,
)
async def test_bodies_that_a_web_page_could_send(daemon: Daemon, headers: dict[str, str]) -> None:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}).encode()
    await check_refusal(daemon, await daemon.http.post(CHAT, content=body, headers=headers), 415)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "evil.test"}, 403),
        ({"host": "127.0.0.1.evil.test"}, 403),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:4633"}, 200),
        ({"origin": "http://evil.test"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
    ],
    ids=str,
)
async def test_hosts_and_origins(daemon: Daemon, headers: dict[str, str], expected: int) -> None:
    response = await daemon.http.get("/v1/models", headers=headers)
    assert response.status_code == expected
    if expected == 403:
        await check_refusal(daemon, response, 403, "forbidden")


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions/", "/v1/v1/chat/completions", "//v1/chat/completions", "/chat/completions", "/v1/responses"],
)
async def test_wrong_paths_name_the_right_base(daemon: Daemon, path: str) -> None:
    response = await daemon.http.post(daemon.address + path, json={"model": "tiny"})
    await check_refusal(daemon, response, 404)
    assert f"{daemon.address}/v1" in response.json()["error"]["message"]


async def test_wrong_method(daemon: Daemon) -> None:
    response = await daemon.http.get(CHAT)
    await check_refusal(daemon, response, 405)
    assert response.headers["allow"] == "POST"


async def test_an_unexpected_failure_tells_nothing(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("/secret/path is gone at 0xdeadbeef")

    with monkeypatch.context() as patched:
        patched.setattr(type(daemon.state.catalog), "list_models", fail)
        response = await daemon.http.get("/v1/models")
    await check_refusal(daemon, response, 500, "internal_error")
    assert response.headers["x-request-id"]
