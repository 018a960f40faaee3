"""What a caller may ask, at each limit and one beyond it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.core.repetition import ends_in_repetition
from inferd.engine.errors import InvalidRequest
from inferd.engine.params import RepetitionDetection, SamplingParams


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", 2.0, 2.01),
        ("temperature", 0, -0.1),
        ("temperature", 1, True),
        ("top_p", 1.0, 0.0),
        ("top_p", 1e-9, 1.01),
        ("top_k", -1, -2),
        ("top_k", 2**31 - 1, 2**31),
        ("seed", 2**63 - 1, 2**63),
        ("seed", -(2**63), "7"),
        ("max_tokens", 1, 0),
        ("max_tokens", None, 1.5),
        ("min_tokens", 0, -1),
        ("stop", ["a"] * 4, ["a"] * 5),
        ("stop", ["x" * 256], ["x" * 257]),
        ("stop", "one string", [""]),
        ("stop_token_ids", [0], [-1]),
        ("n", 128, 129),
        ("n", 1, 0),
        ("min_p", 1.0, 1.01),
        ("min_p", 0, -0.1),
        ("presence_penalty", -2.0, -2.1),
        ("frequency_penalty", 2, 2.1),
        ("repetition_penalty", 0.1, 0.0),
        ("repetition_penalty", 100.0, 101.0),
        ("logit_bias", {0: -100.0, 5: 100}, {5: 100.5}),
        ("logit_bias", {2**31 - 1: 0.0}, {2**31: 0.0}),
        ("logit_bias", dict.fromkeys(range(300), 1.0), dict.fromkeys(range(301), 1.0)),
        ("logit_bias", {}, {1: math.nan}),
        ("allowed_token_ids", [0], []),
        ("allowed_token_ids", None, [-1]),
        ("bad_words", ["no"], ["  "]),
        ("bad_words", ["x"] * 256, ["x"] * 257),
        ("bad_words_token_ids", [[1, 2]], [[-1]]),
        ("logprobs", 0, -2),
        ("logprobs", 20, 21),
        ("logprobs", -1, 1.5),
        ("prompt_logprobs", -1, 21),
    ],
)
def test_limits(field: str, good: Any, bad: Any) -> None:
    SamplingParams(**{field: good})
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: bad})
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match="finite"):
        SamplingParams(**{field: value})


def test_min_tokens_fits_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=5, max_tokens=None)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (dict(max_pattern_size=1), dict(max_pattern_size=0)),
        (dict(max_pattern_size=2, min_pattern_size=2), dict(max_pattern_size=2, min_pattern_size=3)),
        (dict(max_pattern_size=2, min_count=2), dict(max_pattern_size=2, min_count=1)),
        (dict(max_pattern_size=512, min_count=8), dict(max_pattern_size=513, min_count=8)),
    ],
)
def test_repetition_detection(good: dict[str, int], bad: dict[str, int]) -> None:
    RepetitionDetection(**good)
    with pytest.raises(InvalidRequest) as caught:
        RepetitionDetection(**bad)
    assert caught.value.param == "repetition_detection"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 3), st.integers(0, 3), st.integers(2, 4))
def test_repetition_is_found_where_it_is(token_ids: list[int], low: int, more: int, count: int) -> None:
    wanted = RepetitionDetection(max_pattern_size=low + more, min_pattern_size=low, min_count=count)
    found = any(
        len(token_ids) >= size * count and token_ids[-size * count :] == token_ids[-size:] * count
        for size in range(low, low + more + 1)
    )
    assert ends_in_repetition([9, 9, *token_ids], len(token_ids), wanted) == found


def test_normal_forms() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=0.01).greedy


@given(
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**31 - 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(-1, 20),
    extra_args=st.none() | st.dictionaries(st.text("abc", max_size=3), st.integers(0, 9) | st.lists(st.booleans())),
    repetition_detection=st.none() | st.builds(RepetitionDetection, st.integers(1, 9)),
    stop=st.lists(st.text(min_size=1, max_size=20).filter(lambda text: max(text) < "\ud800"), max_size=4),
)
def test_survives_the_wire(**fields: Any) -> None:
    params = SamplingParams(**fields)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_bad_values_do_not_come_through_the_wire() -> None:
    frame = msgspec.msgpack.encode({"temperature": 99.0})
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(frame, type=SamplingParams)


def test_unknown_fields_do_not_come_through_the_wire() -> None:
    frame = msgspec.msgpack.encode({"temprature": 1.0})
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.msgpack.decode(frame, type=SamplingParams)


def test_a_stop_string_is_valid_unicode() -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        SamplingParams(stop=["a\ud800"])
    assert caught.value.param == "stop"
