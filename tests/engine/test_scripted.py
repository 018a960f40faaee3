"""The scripted executor fails the engine when a scheduler's differences do not add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.engine.config import EngineArgs
from inferd.engine.core.kv.spec import KVCacheConfig
from inferd.engine.core.output import KnownRequests, NewRequest, SchedulerOutput
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.testing.model_folder import make_model_folder
from inferd.engine.testing.scripted import ScriptedExecutor


@pytest.fixture
def make_executor(tmp_path: Path) -> Callable[..., ScriptedExecutor]:
    def make(**scripted: Any) -> ScriptedExecutor:
        folder = make_model_folder(tmp_path / "model", **scripted)
        config = resolve(EngineArgs(model=str(folder), executor="scripted", device="cpu", block_size=4))
        executor = ScriptedExecutor(config)
        executor.initialize_kv_cache(KVCacheConfig(num_blocks=8, groups=()))
        return executor

    return make


def first_step(
    token_ids: list[int], *, num_tokens: int | None = None, blocks: tuple[int, ...] = (1, 2)
) -> SchedulerOutput:
    new = NewRequest("a", token_ids, len(token_ids), SamplingParams(), 0, (list(blocks),), 0)
    return step(new=[new], scheduled={"a": len(token_ids) if num_tokens is None else num_tokens})


def step(*, scheduled: dict[str, int], **fields: Any) -> SchedulerOutput:
    empty = SchedulerOutput(1, [], KnownRequests(), scheduled, sum(scheduled.values()), [], [], [])
    return msgspec.structs.replace(empty, **fields)


def run(executor: ScriptedExecutor, output: SchedulerOutput) -> dict[str, list[int]]:
    executor.execute_model(output).result()
    return executor.sample_tokens().result().sampled_token_ids


def test_a_chunk_that_has_not_caught_up_samples_nothing(make_executor: Callable[..., ScriptedExecutor]) -> None:
    executor = make_executor()
    assert run(executor, first_step([1, 2, 3, 4], num_tokens=3)) == {}
    known = KnownRequests(["a"], [None], [3])
    (token,) = run(executor, step(known=known, scheduled={"a": 1}))["a"]
    assert run(make_executor(), first_step([1, 2, 3, 4]))["a"] == [token]


def test_the_next_token_depends_on_every_known_token(make_executor: Callable[..., ScriptedExecutor]) -> None:
    prompts = [[1, 2, 3, number] for number in range(8)] + [[number, 2, 3, 4] for number in range(8)]
    assert len({run(make_executor(), first_step(prompt))["a"][0] for prompt in prompts}) > 4


@pytest.mark.parametrize(
    ("known", "scheduled", "message"),
    [
        (KnownRequests(["a"], [None], [2]), {"a": 1}, "4 computed tokens here, 2 there"),
        (KnownRequests(["a"], [None], [4]), {"a": 2}, "6 tokens to compute, 5 known"),
        (KnownRequests(["b"], [None], [4]), {"b": 1}, "b"),
        (KnownRequests(["a"], [([9],)], [4]), {"a": 1}, "block ids"),
    ],
)
def test_differences_that_do_not_add_up(
    make_executor: Callable[..., ScriptedExecutor], known: KnownRequests, scheduled: dict[str, int], message: str
) -> None:
    executor = make_executor()
    run(executor, first_step([1, 2, 3, 4]))
    with pytest.raises((RuntimeError, KeyError), match=message):
        run(executor, step(known=known, scheduled=scheduled))


def test_tokens_must_fit_their_blocks(make_executor: Callable[..., ScriptedExecutor]) -> None:
    with pytest.raises(RuntimeError, match="do not fit its 1 blocks"):
        run(make_executor(), first_step([1, 2, 3, 4, 5], blocks=(1,)))


def test_an_unknown_option_is_refused(make_executor: Callable[..., ScriptedExecutor]) -> None:
    with pytest.raises(msgspec.ValidationError, match="no_such_option"):
        make_executor(no_such_option=1)
