"""What clients ask of sampling, over real sockets and a real engine with made-up weights."""

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
REAL_ENGINE = {"executor": "uniproc", "load_format": "dummy", "dtype": "float32", "num_threads": 1, "num_blocks": 600}
Daemon = Any  # the conftest's; test folders are no packages


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(
    run_daemon_in_module: Any, tmp_path_factory: pytest.TempPathFactory, short_run_dir: Path
) -> AsyncIterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    async with run_daemon_in_module(folder, short_run_dir, engine=REAL_ENGINE) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(daemon: Daemon) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{daemon.address}/v1", api_key="-", max_retries=0) as made:
        yield made


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("num_top", [0, 5, 20])
async def test_logprobs_of_a_chat(daemon: Daemon, num_top: int) -> None:
    asked = dict(logprobs=True, top_logprobs=num_top, max_tokens=12, seed=3, temperature=1.0, ignore_eos=True)
    (choice,) = ok(await daemon.chat(**asked))["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 12
    text = b"".join(bytes(token["bytes"]) for token in content).decode("utf-8", "replace")
    assert text == choice["message"]["content"]
    for token in content:
        assert token["logprob"] <= 0
        top = [other["logprob"] for other in token["top_logprobs"]]
        assert len(top) == num_top
        assert top == sorted(top, reverse=True)
    chunks = events(await daemon.chat(**asked, stream=True))
    streamed = [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        if choice.get("logprobs")
        for token in choice["logprobs"]["content"]
    ]
    assert [token["bytes"] for token in streamed] == [token["bytes"] for token in content]
    assert [token["logprob"] for token in streamed] == pytest.approx([token["logprob"] for token in content], abs=1e-4)


async def test_a_stop_token_has_no_place_in_a_chats_logprobs(daemon: Daemon) -> None:
    for stop_is_shown in (False, True):
        asked = dict(logprobs=True, allowed_token_ids=[65], max_tokens=4, include_stop_str_in_output=stop_is_shown)
        (choice,) = ok(await daemon.chat(**asked, stop_token_ids=[65], min_tokens=0))["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == ("A" if stop_is_shown else "")
        shown = choice["logprobs"]
        assert (shown is None) is not stop_is_shown


async def test_openai_client_reads_choices_and_logprobs(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    body: dict[str, Any] = dict(
        model=MODEL, messages=messages, n=3, seed=7, temperature=1.0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    answer = await client.chat.completions.create(**body)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(
        len(choice.logprobs.content or []) for choice in answer.choices if choice.logprobs
    )
    alone = await client.chat.completions.create(**(body | dict(n=1, seed=8)))
    assert alone.choices[0].message.content == texts[1]
    stream = await client.chat.completions.create(**body, stream=True)
    parts: dict[int, str] = {}
    finished = []
    async for chunk in stream:
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                finished.append(choice.index)
    assert [parts[index] for index in range(3)] == texts
    assert sorted(finished) == [0, 1, 2]


async def test_completions_count_choices_through_their_prompts(daemon: Daemon) -> None:
    asked = dict(prompt=["ab", "cd"], n=2, best_of=2, max_tokens=3, temperature=1.0, seed=1, ignore_eos=True)
    answer = ok(await daemon.complete(**asked))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 12
    second = ok(await daemon.complete(**(asked | dict(prompt="cd", n=1, best_of=1, seed=2))))
    assert second["choices"][0]["text"] == answer["choices"][3]["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_scores_the_prompt(daemon: Daemon, stream: bool) -> None:
    """As evaluation harnesses read it: one entry a token, offsets into the text."""
    prompt = "score é me"
    asked = dict(prompt=prompt, echo=True, logprobs=1, max_tokens=2, temperature=0, ignore_eos=True, n=2, stream=stream)
    response = await daemon.complete(**asked)
    pieces = [choice for event in (events(response) if stream else [ok(response)]) for choice in event["choices"]]
    for index in range(2):
        mine = [piece for piece in pieces if piece["index"] == index]
        text = "".join(piece["text"] for piece in mine)
        joined = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        for piece in mine:
            for name, values in (piece["logprobs"] or {}).items():
                joined[name] += values
        assert len(joined["tokens"]) == len(prompt.encode()) + 2
        assert text.startswith(prompt)
        assert "".join(joined["tokens"]).startswith(prompt)
        assert joined["token_logprobs"][0] is None
        assert joined["top_logprobs"][0] is None
        assert all(logprob <= 0 for logprob in joined["token_logprobs"][1:])
        assert all(1 <= len(top) <= 2 for top in joined["top_logprobs"][1:])
        offsets = joined["text_offset"]
        assert offsets[0] == 0
        for token, offset in zip(joined["tokens"][: len(prompt.encode())], offsets, strict=False):
            assert text[offset : offset + len(token)] == token


async def test_prompt_logprobs(daemon: Daemon) -> None:
    (choice,) = ok(await daemon.complete("abcd", prompt_logprobs=2, max_tokens=1))["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry.values()))["decoded_token"] for entry in others] == ["b", "c", "d"]
    assert all(2 <= len(entry) <= 3 for entry in others)
    chat = ok(await daemon.chat(prompt_logprobs=0, max_tokens=1))
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_tokens_are_banned_and_forced(daemon: Daemon) -> None:
    greedy = dict(temperature=0, max_tokens=8, ignore_eos=True, min_tokens=8)

    async def text(**asked: Any) -> str:
        return str(ok(await daemon.complete("hello", **(greedy | asked)))["choices"][0]["text"])

    assert await text(logit_bias={"65": 100}) == "A" * 8
    assert await text(allowed_token_ids=[66]) == "B" * 8
    assert await text(logit_bias={"65": 100, "66": 90}, bad_words=["AA"]) == "AB" * 4
    assert await text(logit_bias={"65": 100, "66": 90}) == "A" * 8
    assert set(await text(logit_bias={"65": 100, "66": 90}, frequency_penalty=2)) == {"A", "B"}
    assert "A" not in await text(logit_bias={"65": -100})


async def test_repetition_ends_an_answer(daemon: Daemon) -> None:
    asked = dict(allowed_token_ids=[65], max_tokens=50, repetition_detection={"max_pattern_size": 2, "min_count": 6})
    answer = ok(await daemon.complete("hello", **asked))
    assert answer["choices"][0]["text"] == "A" * 6
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_request_that_allows_nothing_is_told_so(daemon: Daemon) -> None:
    response = await daemon.complete("hello", allowed_token_ids=[257], min_tokens=3)
    assert response.status_code == 500
    assert (await daemon.chat(max_tokens=1)).status_code == 200
