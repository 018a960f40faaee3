"""An engine falls asleep and wakes: what becomes of requests and of memory, on the way and meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from inferd.engine.core.step import EngineCore
from inferd.engine.errors import EngineAsleep, LoadError
from inferd.engine.messages import AddRequest, Call, EngineOutput, FinishReason, KVCacheCleared, WakeReport
from inferd.engine.testing.fake_executor import FAKE_WEIGHTS_BYTES, FakeExecutor, scrambled

MakeAdd = Callable[..., AddRequest]
VOCAB = 97  # of the engines here


class Sleepy:
    """An engine with a control desk that is answered in time, and all that its requests were told."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.outputs: list[EngineOutput] = []
        self.kv_events: list[Any] = []

    def ask(self, method: str, *args: Any) -> Any:
        reply = self.core.call(Call(0, method, list(args)))
        while reply is None:
            reply = self.step()
        self.kv_events += self.core.take_kv_events()
        assert reply.error is None, reply.error
        return reply.result

    def refusal_of(self, method: str, *args: Any) -> str:
        reply = self.core.call(Call(0, method, list(args)))
        assert reply is not None
        assert reply.error is not None
        return reply.error

    def step(self) -> Any:
        said = self.core.step()
        self.outputs += said.outputs
        self.kv_events += said.kv_events
        return said.reply

    def finish(self) -> None:
        while self.core.has_work:
            self.step()

    def add(self, *adds: AddRequest) -> None:
        for add in adds:
            self.core.add(add)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.new_token_ids]

    @property
    def reasons(self) -> dict[str, FinishReason]:
        return {output.request_id: output.finish_reason for output in self.outputs if output.finish_reason is not None}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def make_sleepy(make_core: Callable[..., EngineCore], request: pytest.FixtureRequest) -> Callable[..., Sleepy]:
    def make(**options: Any) -> Sleepy:
        return Sleepy(make_core(**({"async_scheduling": request.param} | options)))

    return make


@pytest.fixture
def adds(make_add: MakeAdd) -> list[AddRequest]:
    """Of six tokens each."""
    return [make_add(name, (5 + at, 6, 7), max_tokens=6, ignore_eos=True) for at, name in enumerate("abc")]


def alone(add: AddRequest) -> list[int]:
    tokens, next_token = list(add.prompt_token_ids), scrambled(VOCAB)
    for _ in range(add.params.max_tokens or 0):
        tokens.append(next_token(tokens))
    return tokens[len(add.prompt_token_ids) :]


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_nothing_is_there_and_awake_everything_is(
    make_sleepy: Callable[..., Sleepy], adds: list[AddRequest], level: int
) -> None:
    engine = make_sleepy()
    assert not engine.ask("is_sleeping")
    (before,) = engine.ask("memory")
    report = engine.ask("sleep", level)
    assert report["level"] == level
    assert report["released_bytes"] == {"weights": FAKE_WEIGHTS_BYTES, "kv_cache": before["kv"]}
    assert engine.ask("is_sleeping")
    assert engine.ask("sleep_state") == f"sleeping_{level}"
    assert engine.ask("memory") == [before | {"weights": 0, "kv": 0}]
    assert engine.ask("wake")["restored_bytes"] == report["released_bytes"]
    assert engine.ask("sleep_state") == "awake"
    assert engine.ask("memory") == [before]
    engine.add(adds[0])
    engine.finish()
    assert engine.tokens("a") == alone(adds[0])


class TestWhatRuns:
    def test_is_finished_and_what_waits_is_held(
        self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]
    ) -> None:
        engine = make_sleepy(max_num_seqs=1)
        engine.add(*adds)
        engine.step()
        engine.ask("sleep", 1, "wait")
        assert engine.reasons == {"a": FinishReason.LENGTH}
        engine.finish()
        assert engine.tokens("b") == []
        engine.ask("wake")
        engine.finish()
        assert [engine.tokens(add.request_id) for add in adds] == [alone(add) for add in adds]

    def test_is_kept_and_computed_again(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        engine = make_sleepy()
        engine.add(*adds)
        for _ in range(3):
            engine.step()
        engine.ask("sleep", 2, "keep")
        assert engine.reasons == {}
        assert engine.core.stats().blocks_free == engine.core.stats().blocks_total
        engine.ask("wake")
        engine.finish()
        assert [engine.tokens(add.request_id) for add in adds] == [alone(add) for add in adds]
        assert {output.num_preemptions for output in engine.outputs if output.finish_reason} == {1}

    def test_is_ended(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        engine = make_sleepy(max_num_seqs=1)
        engine.add(*adds)
        engine.step()
        engine.ask("sleep", 1, "abort")
        assert engine.reasons == dict.fromkeys("abc", FinishReason.ABORT)

    def test_is_in_the_way(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        engine = make_sleepy()
        engine.add(*adds)
        assert "3 requests are not finished" in engine.refusal_of("sleep", 1, "refuse")
        assert engine.ask("sleep_state") == "awake"
        engine.finish()
        assert len(engine.reasons) == 3
        assert engine.ask("sleep", 1, "refuse")["level"] == 1

    def test_a_kept_request_may_be_ended_by_a_second_call(
        self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]
    ) -> None:
        """While the first still waits. The deeper level counts."""
        engine = make_sleepy()
        engine.add(*adds)
        engine.step()
        assert engine.core.call(Call(1, "sleep", [2])) is None
        assert engine.ask("sleep_state") == "draining"
        assert engine.ask("sleep", 1, "abort")["level"] == 2
        assert engine.reasons == dict.fromkeys("abc", FinishReason.ABORT)


class TestMeanwhile:
    def test_requests_are_held(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        engine = make_sleepy()
        engine.ask("sleep")
        engine.add(*adds)
        assert not engine.core.has_work
        engine.ask("wake", ["weights"])
        assert not engine.core.has_work
        engine.ask("wake", ["kv_cache"])
        engine.finish()
        assert [engine.tokens(add.request_id) for add in adds] == [alone(add) for add in adds]

    def test_or_refused(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        engine = make_sleepy()
        engine.ask("sleep", 1, "wait", "refuse")
        with pytest.raises(EngineAsleep, match="the engine is sleeping_1"):
            engine.add(adds[0])
        engine.ask("wake", ["kv_cache"])
        with pytest.raises(EngineAsleep, match="the engine is waking"):
            engine.add(adds[0])
        engine.ask("wake")
        engine.add(adds[0])

    def test_a_held_one_may_leave(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        engine = make_sleepy()
        engine.add(adds[0])
        engine.step()
        engine.ask("sleep", 1, "keep")
        engine.add(adds[1])
        assert [output.finish_reason for output in engine.core.abort(["a", "b"])] == [FinishReason.ABORT] * 2
        assert not engine.core.has_work
        engine.ask("wake")
        engine.add(adds[0])  # the workers have forgotten the first of that name
        engine.finish()
        assert engine.tokens("a")[-6:] == alone(adds[0])

    def test_one_that_was_paused_by_itself_cannot_go_on(
        self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]
    ) -> None:
        """Though it has begun, which is why an engine that falls asleep would let it finish."""
        engine = make_sleepy()
        engine.add(adds[0])
        engine.step()
        engine.ask("pause_request", "a")
        engine.ask("sleep", 1, "wait")
        engine.ask("resume_request", "a")
        assert not engine.core.has_work
        engine.ask("wake")
        engine.finish()
        assert engine.tokens("a") == alone(adds[0])

    def test_held_ones_are_in_no_ones_way(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        engine = make_sleepy()
        engine.ask("sleep", 1, "refuse")
        engine.add(adds[0])
        assert engine.ask("sleep", 2, "refuse")["level"] == 2

    @pytest.mark.parametrize("method", ["pause", "resume"])
    def test_it_cannot_be_paused_or_set_going(self, make_sleepy: Callable[..., Sleepy], method: str) -> None:
        engine = make_sleepy()
        engine.ask("sleep")
        assert f"SleepRefused: {method} is refused: the engine is asleep" in engine.refusal_of(method)
        engine.ask("wake")
        engine.ask(method)

    def test_a_paused_engine_wakes_paused(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        """What a pause has kept is not set going in order to fall asleep either."""
        engine = make_sleepy()
        engine.add(adds[0])
        engine.step()
        engine.ask("pause", "keep")
        engine.ask("sleep", 1, "wait")
        engine.ask("wake")
        assert engine.ask("is_paused")
        assert engine.reasons == {}
        engine.ask("resume")
        engine.finish()
        assert engine.tokens("a") == alone(adds[0])


class TestOnTheWay:
    def test_a_wake_that_comes_first_cancels(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        engine = make_sleepy()
        engine.add(*adds)
        engine.step()
        assert engine.core.call(Call(1, "sleep", [1])) is None
        assert "pause is refused: the engine is falling asleep" in engine.refusal_of("pause")
        assert engine.ask("wake")["is_awake"]
        reply = engine.step()
        assert (reply.call_id, reply.result["level"]) == (1, 0)
        engine.finish()
        assert [engine.tokens(add.request_id) for add in adds] == [alone(add) for add in adds]

    def test_waking_the_waking(self, make_sleepy: Callable[..., Sleepy]) -> None:
        engine = make_sleepy()
        assert engine.ask("wake") == engine.ask("wake", ["weights"])  # of no effect on an engine that is awake
        engine.ask("sleep")
        assert engine.ask("wake", [])["still_asleep"] == ["weights", "kv_cache"]
        assert engine.ask("sleep_state") == "sleeping_1"
        first = engine.ask("wake", ["kv_cache", "kv_cache"])
        assert (first["is_awake"], first["still_asleep"]) == (False, ["weights"])
        assert engine.ask("wake", ["kv_cache"])["restored_bytes"] == {}
        assert engine.ask("sleep_state") == "waking"
        assert engine.ask("is_sleeping")
        assert "no memory with the tag 'lora'; there are: kv_cache, weights" in engine.refusal_of("wake", ["lora"])
        assert list(engine.ask("wake")["restored_bytes"]) == ["weights"]

    def test_level_2_follows_level_1_but_not_the_other_way(self, make_sleepy: Callable[..., Sleepy]) -> None:
        engine = make_sleepy()
        engine.ask("sleep", 1)
        assert engine.ask("sleep", 1)["level"] == 1
        deeper = engine.ask("sleep", 2)
        assert (deeper["level"], set(deeper["released_bytes"].values())) == (2, {0})
        assert engine.ask("sleep", 1)["level"] == 2
        assert engine.ask("wake")["is_awake"]

    def test_asleep_again_before_all_was_awake(self, make_sleepy: Callable[..., Sleepy]) -> None:
        """Weights that level 2 has let go of are not nearer at level 1."""
        engine = make_sleepy()
        engine.ask("sleep", 2)
        engine.ask("wake", ["kv_cache"])
        assert engine.ask("sleep", 1)["level"] == 2
        engine.ask("wake", ["weights"])
        assert engine.ask("sleep", 1)["level"] == 1
        assert engine.ask("wake")["is_awake"]

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ((3,), "unknown level of sleep: 3; there are: 1, 2"),
            ((1, "now"), "unknown mode of sleep: 'now'; there are: wait, keep, abort, refuse"),
            ((1, "wait", "lose"), "unknown requests of sleep: 'lose'; there are: hold, refuse"),
        ],
    )
    def test_unknown_words(self, make_sleepy: Callable[..., Sleepy], args: tuple[Any, ...], said: str) -> None:
        assert said in make_sleepy().refusal_of("sleep", *args)


def test_the_prefix_cache_is_empty_and_followers_hear_of_it(
    make_core_config: Callable[..., Any], adds: list[AddRequest], make_add: MakeAdd
) -> None:
    config = make_core_config()
    config = replace(config, cache=replace(config.cache, enable_kv_events=True))
    engine = Sleepy(EngineCore(config, FakeExecutor()))
    long_prompt = make_add("a", range(10, 30), max_tokens=1)
    engine.add(long_prompt)
    engine.finish()
    engine.ask("sleep")
    assert isinstance(engine.kv_events[-1], KVCacheCleared)
    engine.ask("wake")
    engine.add(long_prompt)
    engine.finish()
    assert engine.outputs[-1].num_cached_tokens == 0


class Troubled(FakeExecutor):
    """Something is the matter with waking."""

    refusal: str | None = None
    failure: Exception | None = None
    other_weights = False

    def sleep_refusal(self) -> str | None:
        return self.refusal

    def wake(self, tags: Sequence[str]) -> WakeReport:
        if self.failure is not None:
            raise self.failure
        if self.other_weights:
            self._next_token = lambda token_ids: len(token_ids) % VOCAB
        return super().wake(tags)


class TestTrouble:
    def test_memory_that_cannot_be_given_back(self, make_sleepy: Callable[..., Sleepy]) -> None:
        executor = Troubled()
        executor.refusal = "there is no arena"
        engine = make_sleepy(executor=executor)
        assert "NotSupported: there is no arena" in engine.refusal_of("sleep")
        assert engine.ask("sleep_state") == "awake"

    def test_weights_that_are_gone(self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest]) -> None:
        """Everything sleeps on, and the next try may go well."""
        executor = Troubled()
        engine = make_sleepy(executor=executor)
        engine.ask("sleep", 2)
        engine.add(adds[0])
        engine.ask("wake", ["kv_cache"])
        executor.failure = LoadError("the folder is gone")
        assert "LoadError: the folder is gone" in engine.refusal_of("wake")
        assert engine.ask("sleep_state") == "sleeping_2"
        executor.failure = None
        assert engine.ask("wake")["is_awake"]
        engine.finish()
        assert engine.tokens("a") == alone(adds[0])

    def test_other_weights_than_before(self, make_sleepy: Callable[..., Sleepy]) -> None:
        executor = Troubled()
        engine = make_sleepy(executor=executor)
        engine.ask("sleep")
        executor.other_weights = True
        assert "what was loaded again is not what was there" in engine.refusal_of("wake")
        assert engine.ask("sleep_state") == "sleeping_1"

    def test_what_cannot_fall_asleep_stays_awake(
        self, make_sleepy: Callable[..., Sleepy], adds: list[AddRequest], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_sleepy()
        with monkeypatch.context() as patch:
            patch.setattr(FakeExecutor, "sleep", lambda *_: 1 // 0)
            assert "ZeroDivisionError" in engine.refusal_of("sleep")
        engine.add(adds[0])
        engine.finish()
        assert engine.tokens("a") == alone(adds[0])
