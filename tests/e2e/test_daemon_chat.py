"""Chat and completions as clients see them, over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "tiny"
ANSWER = "The capital of France is Paris. \N{FRENCH FRIES} é \N{SMILING FACE WITH SUNGLASSES}"
Daemon = Any  # the conftest's; test folders are no packages


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(
    run_daemon_in_module: Any, tmp_path_factory: pytest.TempPathFactory, short_run_dir: Path
) -> AsyncIterator[Daemon]:
    async with run_daemon_in_module(tmp_path_factory.mktemp("daemon"), short_run_dir) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(daemon: Daemon) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{daemon.address}/v1", api_key="-", max_retries=0) as made:
        yield made


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each event; asserts what every stream of ours looks like."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith(("data: ", ":")) and "\n" not in block for block in blocks[:-1])
    return [json.loads(block[6:]) for block in blocks[:-2] if block.startswith("data: ")]


async def test_openai_client_streams_what_it_gets_at_once(client: openai.AsyncOpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "capital of France?"}]}
    whole = await client.chat.completions.create(**body)
    stream = await client.chat.completions.create(**body, stream=True)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content == ANSWER
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


async def test_openai_stream_helper_accumulates(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "capital of France?"}]
    async with client.chat.completions.stream(model=MODEL, messages=messages) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER
    assert final.choices[0].message.role == "assistant"


async def test_stream_shape(daemon: Daemon) -> None:
    chunks = events(await daemon.chat("capital of France?", stream=True))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", MODEL)}
    first, *middle, last = (chunk["choices"][0] for chunk in chunks)
    assert first == {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    assert all(list(choice["delta"]) == ["content"] and choice["finish_reason"] is None for choice in middle)
    assert last == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert not any("usage" in chunk for chunk in chunks)


async def test_headers_of_a_stream(daemon: Daemon) -> None:
    response = await daemon.chat(stream=True)
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_answer_in_one_body(daemon: Daemon) -> None:
    answer = (await daemon.chat(max_tokens=3, ignore_eos=True)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3


@pytest.mark.parametrize("asked", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}])
async def test_no_usage_unless_asked(daemon: Daemon, asked: dict[str, Any]) -> None:
    assert not any("usage" in chunk for chunk in events(await daemon.chat(stream=True, **asked)))


async def test_usage_is_the_last_chunk_without_choices(daemon: Daemon) -> None:
    chunks = events(await daemon.chat(stream=True, stream_options={"include_usage": True}))
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len("hi there") + 1  # and its end of sequence
    assert not any("usage" in chunk for chunk in others)


async def test_continuous_usage_never_falls(daemon: Daemon) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await daemon.chat(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"max_tokens": 2}, 2),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 2, "max_completion_tokens": 3}, 3),
    ],
)
async def test_both_names_of_the_limit(daemon: Daemon, asked: dict[str, int], expected: int) -> None:
    answer = (await daemon.chat(**asked)).json()
    assert answer["usage"]["completion_tokens"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_more_than_the_room_is_clamped_and_said(daemon: Daemon) -> None:
    response = await daemon.chat(max_tokens=10**9)
    assert response.status_code == 200
    assert response.headers["x-inferd-warning"].startswith("max_tokens lowered from 1000000000 to ")


async def test_no_limit_means_all_the_room(daemon: Daemon) -> None:
    response = await daemon.chat("hello", ignore_eos=True, min_tokens=1)
    usage = response.json()["usage"]
    assert usage["total_tokens"] == 2048
    assert "x-inferd-warning" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_a_prompt_is_refused_before_any_event(daemon: Daemon, stream: bool) -> None:
    response = await daemon.chat("x" * 3000, stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in error["message"]
    assert "prompt is too long: 30" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_over_several_tokens(daemon: Daemon, stream: bool) -> None:
    response = await daemon.chat("France", stop=["is Par", "zzz"], stream=stream)
    if stream:
        chunks = events(response)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "The capital of France "


async def test_unknown_fields_are_ignored(daemon: Daemon) -> None:
    odd = {"prompt_cache_key": "k", "verbosity": "low", "store": True, "metadata": {"a": 1}, "user": "u", "zzz": [{}]}
    assert (await daemon.chat(**odd)).status_code == 200


async def test_known_fields_that_ask_for_nothing(daemon: Daemon) -> None:
    nothing = {
        "n": 1,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "presence_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": None,
        "stop": None,
        "seed": None,
    }
    assert (await daemon.chat(**nothing)).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]}],
        [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}],
        [{"role": "user", "content": "hello"}, {"role": "system", "content": "late"}],
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "x", "refusal": None, "reasoning_content": "hm"},
            {"role": "user", "content": "hello", "name": "me"},
        ],
        [
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}],
            },
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
    ],
)
async def test_messages_of_real_clients(daemon: Daemon, messages: list[Any]) -> None:
    response = await daemon.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert response.status_code == 200, response.text


async def test_special_tokens_that_a_user_types_stay_text(daemon: Daemon) -> None:
    typed = "<|im_end|>"
    plain = (await daemon.chat("x" * len(typed))).json()["usage"]["prompt_tokens"]
    assert (await daemon.chat(typed)).json()["usage"]["prompt_tokens"] == plain  # one token a character


async def test_cached_tokens_are_counted_and_salts_never_share(daemon: Daemon) -> None:
    async def cached(salt: str) -> int:
        response = await daemon.complete([9, 8, 7, 6, 5, 4, 3, 2, 1], max_tokens=1, cache_salt=salt)
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached("a"), await cached("a"), await cached("b")] == [0, 8, 0]


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [("hello", 1), (["hello", "France"], 2), ([104, 105], 1), ([[104], [105], [106]], 3), (["x"] * 64, 64)],
)
async def test_forms_of_a_prompt(daemon: Daemon, prompt: Any, num_choices: int) -> None:
    answer = (await daemon.complete(prompt, max_tokens=2)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert [choice["index"] for choice in answer["choices"]] == list(range(num_choices))
    assert answer["usage"]["completion_tokens"] == 2 * num_choices


async def test_several_prompts_stream_side_by_side(daemon: Daemon) -> None:
    prompts = ["hello", "France", "hello again"]
    whole = (await daemon.complete(prompts, max_tokens=50)).json()
    chunks = events(await daemon.complete(prompts, max_tokens=50, stream=True, stream_options={"include_usage": True}))
    texts, finishes = ["", "", ""], [[], [], []]  # type: ignore[var-annotated]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finishes[choice["index"]].append(choice["finish_reason"])
    assert texts == [choice["text"] for choice in whole["choices"]] == ["hi there", ANSWER, "hi there"]
    assert finishes == [["stop"]] * 3
    assert chunks[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}


async def test_completions_default_to_sixteen_tokens(daemon: Daemon) -> None:
    answer = (await daemon.complete("France")).json()
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
async def test_echo(daemon: Daemon, prompt: Any, stream: bool) -> None:
    response = await daemon.complete(prompt, echo=True, stream=stream)
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in events(response))
    else:
        text = response.json()["choices"][0]["text"]
    assert text == "hellohi there"


async def test_models(daemon: Daemon, client: openai.AsyncOpenAI) -> None:
    listed = (await client.models.list()).data
    assert [card.id for card in listed] == [MODEL]
    card = (await daemon.http.get(f"/v1/models/{MODEL}")).json()
    assert card["max_model_len"] == 2048
    assert card["object"] == "model"


async def test_unknown_model_lists_the_known_ones(daemon: Daemon, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        await client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])
    assert raised.value.code == "model_not_found"
    assert MODEL in raised.value.message
    assert (await daemon.http.get("/v1/models/org/name")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/ready", "/readyz", "/version"])
async def test_open_routes(daemon: Daemon, path: str) -> None:
    assert (await daemon.http.get(path)).status_code == 200
    assert (await daemon.http.head(path)).status_code == 200


async def test_request_id_is_echoed_or_made(daemon: Daemon) -> None:
    given = await daemon.http.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == given.headers["request-id"] == "abc-1"
    made = await daemon.http.get("/nowhere", headers={"x-request-id": "a b\tc"})
    assert made.headers["x-request-id"] not in ("", "a b\tc")
