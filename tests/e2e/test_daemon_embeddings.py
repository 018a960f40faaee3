"""Embeddings, scores and ranks over HTTP, as clients ask for them, from a tiny encoder in a real engine."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from inferd.engine import LLM
from inferd.engine.testing.encoder_folder import add_sentence_files, make_encoder_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

Daemon = Any  # the conftest's; test folders are no packages
TEXTS = ["the quick brown fox", "a lazy dog", "jumps"]
FIXED: dict[str, Any] = dict(in_process=True, device="cpu", dtype="float32", num_threads=1)


def folder_of(kind: str, home: Path) -> Path:
    if kind == "embedder":
        return add_sentence_files(make_encoder_folder(home / kind), max_seq_length=32)
    return make_encoder_folder(home / kind, "BertForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooling")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(run_daemon_over_folder: Any, home: Path, short_run_dir: Path) -> AsyncIterator[Daemon]:
    async with run_daemon_over_folder(folder_of("embedder", home), home / "one", short_run_dir / "one") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cross_encoder(run_daemon_over_folder: Any, home: Path, short_run_dir: Path) -> AsyncIterator[Daemon]:
    async with run_daemon_over_folder(folder_of("cross", home), home / "two", short_run_dir / "two") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(embedder: Daemon) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{embedder.address}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(home: Path) -> dict[str, list[float]]:
    with LLM(folder_of("embedder", home / "expected"), **FIXED) as llm:
        return {text: output.embedding for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True)}


async def test_every_form_gives_the_same_vector(
    embedder: Daemon, client: openai.AsyncOpenAI, expected: dict[str, list[float]]
) -> None:
    """Text, lists, token ids, lists of them; as base64, which that client asks for by itself, and as numbers."""
    ids = (await embedder.llm()).tokenizer.encode(TEXTS[0])
    forms: list[tuple[Any, list[str]]] = [
        (TEXTS[0], TEXTS[:1]),
        (TEXTS, TEXTS),
        (ids, TEXTS[:1]),
        ([ids, ids], [TEXTS[0], TEXTS[0]]),
    ]
    for given, texts in forms:
        for encoding in ({}, {"encoding_format": "float"}):
            answer = await client.embeddings.create(model=embedder.model, input=given, **encoding)
            assert [item.index for item in answer.data] == list(range(len(texts)))
            for item, text in zip(answer.data, texts, strict=True):
                assert item.embedding == pytest.approx(expected[text], abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 2 * len(ids)
    assert answer.model == embedder.model


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
async def test_encodings_on_the_wire(embedder: Daemon, expected: dict[str, list[float]], encoding: str | None) -> None:
    body = {"model": embedder.model, "input": TEXTS[1], "encoding_format": encoding, "user": "u", "no_such_field": 1}
    answer = (await embedder.http.post("/v1/embeddings", json=body)).json()
    (item,) = answer["data"]
    assert (answer["object"], item["object"], item["index"]) == ("list", "embedding", 0)
    found = item["embedding"]
    if encoding == "base64":
        found = array("f", base64.b64decode(found)).tolist()
    assert found == pytest.approx(expected[TEXTS[1]], abs=1e-6)


async def test_dimensions_and_truncation(embedder: Daemon, client: openai.AsyncOpenAI) -> None:
    short = await client.embeddings.with_raw_response.create(model=embedder.model, input=TEXTS[0], dimensions=8)
    (item,) = short.parse().data
    assert len(item.embedding) == 8
    assert sum(value * value for value in item.embedding) == pytest.approx(1.0)
    assert "not trained for embeddings that are cut" in short.headers["x-inferd-warning"]
    long: dict[str, Any] = {"model": embedder.model, "input": "word " * 40}
    with pytest.raises(openai.BadRequestError, match="maximum context length is 32 tokens") as caught:
        await client.embeddings.create(**long)
    assert caught.value.code == "context_length_exceeded"
    cut = await client.embeddings.create(**long, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 32


async def test_many_clients_at_once(embedder: Daemon, client: openai.AsyncOpenAI) -> None:
    words = [f"{TEXTS[0][: 1 + index % 15]} {TEXTS[1]}" for index in range(300)]
    alone = await client.embeddings.create(model=embedder.model, input=words)
    pairs = zip(words, alone.data, strict=True)
    answers = await asyncio.gather(
        *(client.embeddings.create(model=embedder.model, input=word) for word in words[:100])
    )
    for answer, (_, item) in zip(answers, pairs, strict=False):
        assert answer.data[0].embedding == pytest.approx(item.embedding, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"input": []}, "input", "between 1 and 2048"),
        ({"input": ["a"] * 2049}, "input", "2049"),
        ({"input": [1, "a"]}, "input", "mixes"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": [71]}, "input", "vocabulary"),
        ({"input": {"text": "a"}}, "input", "input"),
        ({}, "input", "input"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1"),
        ({"input": "a", "dimensions": 49}, "dimensions", "above the 48"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "truncate_prompt_tokens": 33}, "truncate_prompt_tokens", "above the 32"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens", "not supported"),
        ({"messages": [], "input": "a"}, "messages", "not supported"),
    ],
)
async def test_what_is_wrong_is_named(embedder: Daemon, fields: dict[str, Any], param: str, named: str) -> None:
    answer = await embedder.http.post("/v1/embeddings", json={"model": embedder.model, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert named in error["message"]


async def test_routes_that_generate_say_what_the_model_is_for(embedder: Daemon) -> None:
    for answer in (await embedder.chat("hello"), await embedder.complete("hello")):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model")
        assert "generates no tokens, it is for embed: use LLM.embed or /v1/embeddings" in error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_a_cross_encoder_ranks(cross_encoder: Daemon, home: Path, path: str) -> None:
    query, documents = "quick fox", [*TEXTS, {"text": "over the fence"}]
    texts = [*TEXTS, "over the fence"]
    with LLM(folder_of("cross", home / "expected"), **FIXED) as llm:
        scores = [output.score for output in llm.score(query, texts)]
    body = {"model": cross_encoder.model, "query": query, "documents": documents}
    answer = (await cross_encoder.http.post(path, json=body)).json()
    order = sorted(range(4), key=lambda index: -scores[index])
    assert [result["index"] for result in answer["results"]] == order
    found = [result["relevance_score"] for result in answer["results"]]
    assert found == pytest.approx([scores[index] for index in order], abs=1e-5)
    assert [result["document"]["text"] for result in answer["results"]] == [texts[index] for index in order]
    assert answer["usage"]["total_tokens"] > 0
    best = (await cross_encoder.http.post(path, json=body | {"top_n": 1, "return_documents": False})).json()
    assert best["results"] == [{"index": order[0], "relevance_score": found[0]}]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_an_embedder_scores_by_cosine(embedder: Daemon, expected: dict[str, list[float]], path: str) -> None:
    body = {"model": embedder.model, "text_1": TEXTS[0], "text_2": TEXTS}
    answer = (await embedder.http.post(path, json=body)).json()
    first = expected[TEXTS[0]]
    cosines = [sum(a * b for a, b in zip(first, expected[text], strict=True)) for text in TEXTS]
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert [item["score"] for item in answer["data"]] == pytest.approx(cosines, abs=1e-5)
    assert answer["data"][0]["score"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("path", "fields", "param", "named"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "between 1"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "negative"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 100]}, "documents", "prompt is too long"),
        ("/v1/rerank", {"documents": ["b"]}, "query", "query"),
        ("/v1/score", {"text_1": [], "text_2": "b"}, "text_1", "nothing to score"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "make no pairs"),
        ("/v1/embeddings", {"input": "a"}, "model", "does not embed; it is for classify, reward, score"),
    ],
)
async def test_what_is_wrong_with_a_score_is_named(
    cross_encoder: Daemon, path: str, fields: dict[str, Any], param: str, named: str
) -> None:
    answer = await cross_encoder.http.post(path, json={"model": cross_encoder.model, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert named in error["message"]
