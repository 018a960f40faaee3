"""Prompts are checked before the engine hears of them, and errors say what to change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inferd.engine.errors import ContextLengthExceeded, InvalidRequest
from inferd.engine.frontend.inputs import InputProcessor, TokensPrompt
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.params import SamplingParams
from inferd.engine.testing.model_folder import make_model_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_processor(tokenizer: Tokenizer) -> Callable[..., InputProcessor]:
    def make(*, max_model_len: int = 20, with_tokenizer: bool = True) -> InputProcessor:
        return InputProcessor(tokenizer if with_tokenizer else None, max_model_len=max_model_len, vocab_size=272)

    return make


@pytest.fixture
def processor(make_processor: Callable[..., InputProcessor]) -> InputProcessor:
    return make_processor()


@pytest.mark.parametrize("prompt", ["hi", [104, 105], TokensPrompt([104, 105], prompt="hi")])
def test_text_and_ids_are_the_same_request(processor: InputProcessor, prompt: str | list[int] | TokensPrompt) -> None:
    request = processor.process(prompt, SamplingParams())
    assert request.add.prompt_token_ids == [104, 105]
    assert request.prompt == (None if isinstance(prompt, list) else "hi")


def test_internal_ids_differ_for_equal_names(processor: InputProcessor) -> None:
    first, second = (processor.process("hi", SamplingParams(), request_id="mine") for _ in range(2))
    assert first.request_id == second.request_id == "mine"
    assert first.add.request_id != second.add.request_id
    assert first.add.request_id.startswith("mine-")


@pytest.mark.parametrize("name", ["cache_salt", "client", "lane", "request_id"])
def test_half_a_surrogate_pair_in_a_field_is_refused(processor: InputProcessor, name: str) -> None:
    """JSON can hold it, no message can."""
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        processor.process("hi", SamplingParams(), **{name: "a\ud800"})
    assert caught.value.param == name


def test_fields_reach_the_engine(processor: InputProcessor) -> None:
    add = processor.process("hi", SamplingParams(), client="key-7", lane="batch", cache_salt="s").add
    assert (add.client, add.lane, add.cache_salt) == ("key-7", "batch", "s")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 272], "token id 272 is outside .* 0 to 271"),
        ([-1], "token id -1"),
        ([1, "2"], "whole number, got '2'"),
        ([True], "whole number, got True"),
        ([2**70], "outside"),
        (None, "not NoneType"),
        ("a\ud800", "surrogate"),
    ],
)
def test_bad_prompts(processor: InputProcessor, prompt: str | list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        processor.process(prompt, SamplingParams())


def test_without_a_tokenizer_only_ids_are_taken(make_processor: Callable[..., InputProcessor]) -> None:
    processor = make_processor(with_tokenizer=False)
    assert processor.process([1, 2], SamplingParams()).add.prompt_token_ids == [1, 2]
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        processor.process("hi", SamplingParams())
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        processor.process([1, 2], SamplingParams(stop="x"))


def test_stop_token_ids_are_in_the_vocabulary(processor: InputProcessor) -> None:
    with pytest.raises(InvalidRequest, match="token id 300") as caught:
        processor.process("hi", SamplingParams(stop_token_ids=[5, 300]))
    assert caught.value.param == "stop_token_ids"


def test_a_prompt_must_leave_room_for_one_token(processor: InputProcessor) -> None:
    assert processor.process([1] * 19, SamplingParams(max_tokens=None)).add.params.max_tokens == 1
    with pytest.raises(ContextLengthExceeded, match="prompt is too long: 20 tokens > 19 maximum"):
        processor.process([1] * 20, SamplingParams())


def test_max_tokens_unset_is_all_the_room(processor: InputProcessor) -> None:
    params = SamplingParams(max_tokens=None)
    request = processor.process("hello", params)
    assert (request.add.params.max_tokens, request.warnings) == (15, [])
    assert params.max_tokens is None  # the caller's own value is left alone


def test_max_tokens_beyond_the_room_is_lowered_with_a_warning(processor: InputProcessor) -> None:
    request = processor.process("hello", SamplingParams(max_tokens=100, min_tokens=50))
    assert (request.add.params.max_tokens, request.add.params.min_tokens) == (15, 15)
    assert request.warnings == [
        "max_tokens lowered from 100 to 15: the context has no more room",
        "min_tokens lowered from 50 to 15: the context has no more room",
    ]
