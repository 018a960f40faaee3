"""Text in, vectors and scores out: through `LLM` in this process, and `AsyncLLM` over an engine of its own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inferd.engine import LLM, AsyncLLM, EngineArgs, PoolingParams, SamplingParams
from inferd.engine.errors import ContextLengthExceeded, InvalidRequest, NotSupported
from inferd.engine.frontend.inputs import TokensPrompt
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.testing.encoder_folder import add_sentence_files, letter_tokenizer, make_encoder_folder
from inferd.engine.testing.random_checkpoint import make_random_checkpoint

FIXED: dict[str, Any] = dict(in_process=True, device="cpu", dtype="float32", kernels="torch", num_threads=1)
TEXTS = ["the quick brown fox", "", "Jumps", "a lazy dog sleeps on a mat" * 2]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(make_encoder_folder(tmp_path_factory.mktemp("embedder")), **FIXED) as llm:
        yield llm


@pytest.fixture(scope="module")
def cross_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder_folder(tmp_path_factory.mktemp("cross"), "BertForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def cross_encoder(cross_folder: Path) -> Iterator[LLM]:
    with LLM(cross_folder, **FIXED) as llm:
        yield llm


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(make_random_checkpoint(tmp_path_factory.mktemp("generator")), **FIXED) as llm:
        yield llm


@torch.no_grad()
def reference_embeddings(folder: Path, texts: list[str]) -> torch.Tensor:
    """As sentence-transformers does it: padded together, the mean over what is no padding, normalised."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    hidden = transformers.AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


def test_embeddings_of_ragged_texts(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "model")
    with LLM(folder, **FIXED) as llm:
        outputs = llm.embed(TEXTS)
    found = torch.tensor([output.embedding for output in outputs])
    torch.testing.assert_close(found, reference_embeddings(folder, TEXTS), atol=1e-5, rtol=1e-5)
    assert [len(output.prompt_token_ids) for output in outputs][1:3] == [2, 7]


def test_texts_are_lower_cased_and_cut_as_the_files_say(tmp_path: Path) -> None:
    folder = add_sentence_files(make_encoder_folder(tmp_path / "model"), max_seq_length=8, do_lower_case=True)
    tokenizer = letter_tokenizer()
    tokenizer.normalizer = None
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(folder, **FIXED) as llm:
        small, large = llm.embed(["abc", "ABC"])
        assert small == large
        with pytest.raises(
            ContextLengthExceeded, match="maximum context length is 8 tokens: prompt is too long: 9 tokens > 8 maximum"
        ):
            llm.embed("abcdefg")
        (cut,) = llm.embed("abcdefg", PoolingParams(truncate_prompt_tokens=-1))
        (whole,) = llm.embed("abcdef")
        assert cut == whole


def test_token_ids_are_taken_as_they_are(embedder: LLM) -> None:
    (by_text,) = embedder.embed("fox")
    by_ids = embedder.embed([by_text.prompt_token_ids, TokensPrompt(by_text.prompt_token_ids)])
    assert by_ids == [by_text, by_text]
    assert embedder.embed(by_text.prompt_token_ids) == [by_text]
    (cut,) = embedder.embed([by_text.prompt_token_ids], PoolingParams(truncate_prompt_tokens=2))
    assert cut.prompt_token_ids == by_text.prompt_token_ids[:2]


def test_fewer_dimensions_are_said_to_lose_quality(embedder: LLM, caplog: pytest.LogCaptureFixture) -> None:
    (whole,) = embedder.embed("fox", PoolingParams(normalize=False))
    (cut,) = embedder.embed("fox", PoolingParams(dimensions=4))
    expected = torch.nn.functional.normalize(torch.tensor(whole.embedding[:4]), dim=0)
    torch.testing.assert_close(torch.tensor(cut.embedding), expected, atol=1e-6, rtol=1e-6)
    assert "not trained for embeddings that are cut" in caplog.text


def test_scores_of_an_embedder_are_cosines(embedder: LLM) -> None:
    one, other, third = (torch.tensor(output.embedding) for output in embedder.embed(["fox", "dog", "fox dog"]))
    scores = [output.score for output in embedder.score("fox", ["dog", "fox dog", "fox"])]
    assert scores == pytest.approx([float(one @ other), float(one @ third), 1.0], abs=1e-6)
    assert embedder.score(["fox", "dog"], ["dog", "fox"])[0].score == pytest.approx(scores[0], abs=1e-6)


@torch.no_grad()
def reference_scores(folder: Path, pairs: list[tuple[str, str]]) -> list[float]:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")
    batch = tokenizer(pairs, padding=True, return_tensors="pt", return_token_type_ids=True)
    assert batch["token_type_ids"].max() == 1
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores: list[float] = model(**batch).logits[:, 0].sigmoid().tolist()
    return scores


def test_a_cross_encoder_reads_both_texts(cross_encoder: LLM, cross_folder: Path) -> None:
    others = ["a lazy dog", "jumps", "over the fence and far away"]
    found = [output.score for output in cross_encoder.score("quick fox", others)]
    assert found == pytest.approx(reference_scores(cross_folder, [("quick fox", other) for other in others]), abs=1e-5)
    raw = cross_encoder.score("quick fox", others, PoolingParams(task="score", activation=False))
    assert torch.tensor([output.score for output in raw]).sigmoid().tolist() == pytest.approx(found, abs=1e-5)


def test_classes_and_rewards(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    with LLM(folder, **FIXED) as llm:
        (classes,) = llm.classify("a lazy dog")
        (rewards,) = llm.reward("a lazy dog")
        with pytest.raises(NotSupported, match="does not score; it is for classify, reward"):
            llm.score("a", "b")
        with pytest.raises(NotSupported, match="does not embed"):
            llm.embed("a")
    assert classes.probs == pytest.approx(torch.tensor(rewards.rewards).softmax(0).tolist(), abs=1e-6)
    assert classes.label == classes.labels[max(range(3), key=rewards.rewards.__getitem__)]
    assert classes.labels == ["label 0", "label 1", "label 2"]
    assert rewards.reward == rewards.rewards[0]


def test_each_kind_refuses_what_the_other_does(embedder: LLM, generator: LLM) -> None:
    with pytest.raises(NotSupported, match=r"generates no tokens, it is for embed: use LLM\.embed"):
        embedder.generate("once upon a time", SamplingParams(max_tokens=2))
    with pytest.raises(NotSupported, match="generates tokens and does not embed"):
        generator.embed("once upon a time")
    with pytest.raises(NotSupported, match="generates tokens and does not score"):
        generator.score("a", "b")
    assert embedder.embed("still there")
    assert generator.generate("still there", SamplingParams(max_tokens=2))


def test_a_model_that_generates_can_be_asked_to_embed(tmp_path: Path) -> None:
    with LLM(make_random_checkpoint(tmp_path / "model"), runner="pooling", **FIXED) as llm:
        outputs = llm.embed(["one", "another text"])
    assert [sum(value * value for value in output.embedding) for output in outputs] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda llm: llm.embed([[71]]), "outside the model's vocabulary"),
        (lambda llm: llm.embed([[]]), "empty"),
        (lambda llm: llm.embed([None]), "not NoneType"),
        (lambda llm: llm.embed("\ud800"), "surrogate"),
        (lambda llm: llm.embed("abc", PoolingParams(truncate_prompt_tokens=2)), "no room for text"),
        (lambda llm: llm.embed("abc", PoolingParams(truncate_prompt_tokens=67)), "above the 66 tokens"),
        (lambda llm: llm.embed("abc", PoolingParams(dimensions=49)), "above the 48"),
        (lambda llm: llm.score([], "b"), "nothing to score"),
        (lambda llm: llm.score("a", "b", PoolingParams(task="score", activation=True)), "scores are cosines"),
        (lambda llm: llm.score(["a", "b"], ["c", "d", "e"]), "2 texts and 3 others"),
    ],
)
def test_wrong_texts_are_refused_and_others_go_on(embedder: LLM, ask: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ask(embedder)
    assert embedder.embed("fine")


@pytest.mark.parametrize(
    ("texts", "limit", "kept"),
    [
        (("abcdef",), 5, ["abc"]),
        (("abcdef",), None, ["abcdef"]),
        (("abcdef", "gh"), 9, ["abcd", "gh"]),
        (("ab", "cdefgh"), 9, ["ab", "cdef"]),
        (("abcdef", "ghijkl"), 8, ["ab", "ghi"]),
        (("abcdef", "ghijkl"), 9, ["abc", "ghi"]),
        (("ab", "cd"), 7, ["ab", "cd"]),
    ],
)
def test_longer_texts_lose_their_ends(
    cross_folder: Path, texts: tuple[str, ...], limit: int | None, kept: list[str]
) -> None:
    """What the tokenizer's file says about cutting and filling up is not for us."""
    tokenizer = Tokenizer.from_folder(cross_folder)
    ids, types = tokenizer.encode_texts(*texts, max_tokens=limit)
    expected = transformers.PreTrainedTokenizerFast(tokenizer_file=str(cross_folder / "tokenizer.json"))(
        *kept, return_token_type_ids=True
    )
    assert (ids, types) == (expected["input_ids"], expected["token_type_ids"])


async def test_many_at_once_over_a_process(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "model")
    with tempfile.TemporaryDirectory(prefix="inferd-", dir="/tmp") as run_dir:
        args = EngineArgs(str(folder), device="cpu", dtype="float32", num_threads=1)
        llm = await AsyncLLM.start(args, Path(run_dir))
        try:
            outputs = await asyncio.gather(*(llm.encode(text) for text in TEXTS * 5))
            found = torch.tensor([output.values for output in outputs])
            expected = reference_embeddings(folder, TEXTS).repeat(5, 1)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            with pytest.raises(NotSupported, match="does not classify"):
                await llm.encode("a", PoolingParams(task="classify"))
            with pytest.raises(NotSupported, match="generates no tokens"):
                await anext(llm.generate("a"))
            assert llm.num_unfinished == 0
        finally:
            await llm.shutdown()


@pytest.mark.parametrize("level", [1, 2])
def test_the_same_vectors_after_a_sleep(tmp_path: Path, level: int) -> None:
    with LLM(make_encoder_folder(tmp_path / "model"), **FIXED) as llm:
        before = llm.embed(TEXTS)
        llm.sleep(level)
        llm.wake()
        assert llm.embed(TEXTS) == before
