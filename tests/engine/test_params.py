"""What a caller may ask, at each limit and one beyond it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.errors import InvalidRequest
from inferd.engine.params import SamplingParams


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


def test_normal_forms() -> None:
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=0.01).greedy


@given(
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**31 - 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
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
