"""What a request may ask, and what becomes of a pooled vector by it. No model, no torch."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from inferd.engine.errors import InvalidRequest, NotSupported
from inferd.engine.messages import PoolingInfo
from inferd.engine.pooling.checks import check_task, refuse_generation
from inferd.engine.pooling.config import Activation, PoolerConfig
from inferd.engine.pooling.params import PoolingInput, PoolingParams
from inferd.engine.pooling.vectors import activated, cosine, finish, unpack

PLAIN = PoolerConfig("mean", ("embed",))
NORMALIZED = PoolerConfig("mean", ("embed",), normalize=True)
LABELS = PoolerConfig("cls", ("classify", "reward"), labels=("a", "b"), activation="softmax")


def vector(*values: float) -> Any:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("pooler", "params", "expected"),
    [
        (PLAIN, dict(), [3.0, 4.0, 12.0]),
        (PLAIN, dict(normalize=True), [3 / 13, 4 / 13, 12 / 13]),
        (NORMALIZED, dict(), [3 / 13, 4 / 13, 12 / 13]),
        (NORMALIZED, dict(normalize=False), [3.0, 4.0, 12.0]),
        (NORMALIZED, dict(dimensions=2), [0.6, 0.8]),
        (PLAIN, dict(dimensions=2), [3.0, 4.0]),
    ],
)
def test_embeddings(pooler: PoolerConfig, params: dict[str, Any], expected: list[float]) -> None:
    found = unpack(finish(vector(3, 4, 12), PoolingParams(**params), pooler))
    assert found == pytest.approx(expected, abs=1e-7)


def test_a_vector_of_zeros_has_no_direction() -> None:
    assert unpack(finish(vector(0, 0), PoolingParams(), NORMALIZED)) == [0.0, 0.0]
    zeros, ones = vector(0, 0).tobytes(), vector(1, 1).tobytes()
    assert (cosine(zeros, ones), cosine(ones, ones)) == (0.0, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("params", "activates"),
    [
        (dict(task="classify"), True),
        (dict(task="classify", activation=False), False),
        (dict(task="reward"), False),
        (dict(task="reward", activation=True), True),
    ],
)
def test_labels(params: dict[str, Any], activates: bool) -> None:
    found = unpack(finish(vector(0.0, math.log(3.0)), PoolingParams(**params), LABELS))
    assert found == pytest.approx([0.25, 0.75] if activates else [0.0, math.log(3.0)])


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("softmax", [0.0, 1.0, 0.0]), ("sigmoid", [0.0, 1.0, 0.5]), ("identity", [-1e4, 1e4, 0.0])],
)
def test_activations_hold_for_any_size(activation: Activation, expected: list[float]) -> None:
    assert activated(vector(-1e4, 1e4, 0), activation).tolist() == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (dict(task="summarise"), "task"),
        (dict(dimensions=0), "dimensions"),
        (dict(dimensions=True), "dimensions"),
        (dict(dimensions=2.0), "dimensions"),
        (dict(normalize=1), "normalize"),
        (dict(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (dict(truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
        (dict(task="embed", activation=True), "activation"),
        (dict(task="score", dimensions=3), "dimensions"),
        (dict(task="reward", normalize=True), "normalize"),
    ],
)
def test_params_are_checked(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PoolingParams(**fields)
    assert caught.value.param == param


def test_params_cross_the_wire() -> None:
    given = PoolingInput(PoolingParams(dimensions=3, normalize=False, truncate_prompt_tokens=-1), [0, 0, 1])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=PoolingInput) == given
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([{"task": "summarise"}]), type=PoolingInput)


def info(*tasks: Any, matryoshka_sizes: list[int] | None = None) -> PoolingInfo:
    return PoolingInfo(list(tasks), 8, [], 1, False, matryoshka_sizes)


@pytest.mark.parametrize(
    ("params", "loaded", "named"),
    [
        (dict(task="embed"), None, "generates tokens and does not embed"),
        (dict(task="classify"), info("embed"), "does not classify; it is for embed"),
        (dict(task="score"), info("classify", "reward"), "does not score"),
        (dict(dimensions=9), info("embed"), "above the 8"),
        (dict(dimensions=3), info("embed", matryoshka_sizes=[2, 4]), "trained for: 2, 4"),
    ],
)
def test_what_a_model_does_not_do_is_named(params: dict[str, Any], loaded: PoolingInfo | None, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_task(PoolingParams(**params), loaded)


@pytest.mark.parametrize("sizes", [None, [], [3]])
def test_sizes_that_are_served(sizes: list[int] | None) -> None:
    check_task(PoolingParams(dimensions=3), info("embed", matryoshka_sizes=sizes))


def test_who_does_not_generate_says_what_else_it_does() -> None:
    refuse_generation(())
    with pytest.raises(NotSupported, match=r"is for embed: use LLM\.embed or /v1/embeddings") as caught:
        refuse_generation(("embed",))
    assert caught.value.param == "model"
