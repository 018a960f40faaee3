"""Engines are started, watched, started again, and stopped to make room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from inferd.appliance.supervisor.backoff import Backoff
from inferd.appliance.supervisor.errors import ModelUnavailable
from inferd.appliance.supervisor.states import IllegalTransition, ModelState, check_transition
from inferd.appliance.supervisor.supervisor import FixedNeeds, Supervisor
from inferd.appliance.supervisor.world import SLOTS, Holding, Limits, Rules
from inferd.engine.errors import LoadError

QUICK = Backoff(first_s=0.01, longest_s=0.02)


class FakeEngine:
    def __init__(self, model: str) -> None:
        self.model = model
        self.gone = asyncio.Event()
        self.level = 0
        self.hangs = False
        self.fails: Exception | None = None

    @property
    def is_alive(self) -> bool:
        return not self.gone.is_set()

    @property
    def last_heartbeat(self) -> float:
        return 0.0 if self.hangs else time.monotonic()

    async def wait_dead(self) -> None:
        await self.gone.wait()

    async def sleep(self, level: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.level = level

    async def wake(self) -> None:
        if self.fails is not None:
            raise self.fails
        self.level = 0

    def kill(self) -> None:
        self.gone.set()

    async def shutdown(self, drain_s: float) -> None:
        self.gone.set()


@dataclass
class Launcher:
    """Starts fake engines; `failures` are raised first, `gate` holds every start back until it is set."""

    failures: list[Exception] = field(default_factory=list)
    gate: asyncio.Event | None = None
    started: list[FakeEngine] = field(default_factory=list)
    num_starts: int = 0

    async def __call__(self, model: str, placement: Holding) -> FakeEngine:
        self.num_starts += 1
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        assert not [engine for engine in self.started if engine.model == model and engine.is_alive], "loaded twice"
        self.started.append(FakeEngine(model))
        return self.started[-1]

    @property
    def loaded(self) -> list[str]:
        return [engine.model for engine in self.started if engine.is_alive and engine.level == 0]


class Sleepers(FixedNeeds):
    asleep = ({}, {})
    keep_alive_s = 0.02


MakeSupervisor = Callable[..., Supervisor[FakeEngine]]


@pytest.fixture
async def make_supervisor() -> AsyncIterator[MakeSupervisor]:
    made: list[Supervisor[FakeEngine]] = []

    def make(start: Launcher, planner: FixedNeeds | None = None, **options: object) -> Supervisor[FakeEngine]:
        limits = Limits(**{name: options.pop(name) for name in ("rules", "load_timeout_s") if name in options})  # type: ignore[arg-type]
        values = {"crashes": QUICK, "failed_loads": QUICK, "limits": lambda: limits, **options}
        made.append(Supervisor(start, planner or FixedNeeds(), **values))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for supervisor in made:
        await supervisor.drain(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is another task's state
            await asyncio.sleep(0.001)


async def test_a_second_caller_gets_the_same_engine(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher)
    first, second = await asyncio.gather(supervisor.ensure_ready("m"), supervisor.ensure_ready("m"))
    assert first is second
    assert len(launcher.started) == 1


async def test_requests_wait_while_loading(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher(gate=asyncio.Event())
    supervisor = make_supervisor(launcher)
    waiting = asyncio.create_task(supervisor.ensure_ready("m"))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert launcher.gate is not None
    launcher.gate.set()
    assert (await waiting).is_alive


async def test_a_load_that_takes_too_long_is_told(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher(gate=asyncio.Event()), load_timeout_s=0.01)
    with pytest.raises(ModelUnavailable) as told:
        await supervisor.ensure_ready("m")
    assert told.value.code == "model_loading"
    assert told.value.retry_after_s


async def test_a_dead_engine_is_started_again(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher)
    first = await supervisor.ensure_ready("m")
    first.gone.set()
    second = await supervisor.ensure_ready("m")
    assert second is not first
    assert second.is_alive


async def test_one_failed_load_gives_its_reason_to_everyone_who_waits(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher(failures=[LoadError("/models/m/model.safetensors: tensor lm_head.weight is missing")] * 9)
    supervisor = make_supervisor(launcher, failed_loads=Backoff(first_s=10, longest_s=300))
    told = await asyncio.gather(*(supervisor.ensure_ready("m") for _ in range(20)), return_exceptions=True)
    assert launcher.num_starts == 1
    assert {str(error) for error in told} == {str(told[0])}
    assert "load_error" in str(told[0])
    assert "/models" not in str(told[0])
    slot = supervisor.slot("m")
    assert slot is not None
    assert slot.failure is not None
    assert "lm_head.weight is missing" in str(slot.failure.error)
    with pytest.raises(ModelUnavailable) as refused:
        await supervisor.ensure_ready("m")
    assert refused.value.retry_after_s is not None
    assert 0 < refused.value.retry_after_s <= 10
    assert launcher.num_starts == 1


async def test_after_the_cool_down_the_next_request_tries_again(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher(failures=[LoadError("x")]))
    with pytest.raises(ModelUnavailable):
        await supervisor.ensure_ready("m")
    assert (await supervisor.ensure_ready("m")).is_alive


async def test_a_broken_model_does_not_disturb_another(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher)
    async with supervisor.lease("good") as engine:
        launcher.failures = [LoadError("x")]
        asking = asyncio.create_task(supervisor.ensure_ready("bad"))
        await asyncio.sleep(0.01)
        assert engine.is_alive
    with pytest.raises(ModelUnavailable):
        await asking
    assert (await supervisor.ensure_ready("good")).is_alive


async def test_a_dead_engine_comes_back_although_nobody_asks(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher)
    (await supervisor.ensure_ready("m")).gone.set()
    await until(lambda: len(launcher.loaded) == 1 and launcher.num_starts == 2)


async def test_a_silent_engine_counts_as_dead(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher, hung_after_s=0.02)
    first = await supervisor.ensure_ready("m")
    first.hangs = True
    await until(lambda: launcher.num_starts == 2)
    assert not first.is_alive


async def test_an_idle_model_makes_room(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher)
    first = await supervisor.ensure_ready("a")
    await supervisor.ensure_ready("b")
    assert not first.is_alive
    assert launcher.loaded == ["b"]


async def test_a_model_in_use_keeps_its_room(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher(), rules=Rules(min_stay_s=0.0, stay_per_load=0.0))
    async with supervisor.lease("a") as engine:
        asking = asyncio.create_task(supervisor.ensure_ready("b"))
        await asyncio.sleep(0.02)
        assert engine.is_alive
        assert supervisor.waits_for["b"] == ("a",)
        late = asyncio.create_task(supervisor.ensure_ready("a"))
        await asyncio.sleep(0.01)
        assert not late.done()  # or b would wait for ever
    assert (await asking).model == "b"
    assert (await late).model == "a"


async def test_whoever_waits_too_long_for_room_is_told_who_has_it(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher(), load_timeout_s=0.05)
    async with supervisor.lease("a"):
        with pytest.raises(ModelUnavailable, match="room that a has"):
            await supervisor.ensure_ready("b")


async def test_a_model_that_never_fits_is_refused(make_supervisor: MakeSupervisor) -> None:
    class TooLarge(FixedNeeds):
        options = ({SLOTS: 2},)

    supervisor = make_supervisor(Launcher(), TooLarge())
    with pytest.raises(ModelUnavailable, match="needs 2 places") as told:
        await supervisor.ensure_ready("m")
    assert told.value.code == "insufficient_memory"


async def test_a_swap_storm_is_served_in_turns(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher, rules=Rules(min_stay_s=0.05))

    async def ask(model: str) -> str:
        async with supervisor.lease(model) as engine:
            assert launcher.loaded == [model]
            await asyncio.sleep(0.002)
            return engine.model

    answers = await asyncio.gather(*(ask("ab"[index % 2]) for index in range(40)))
    assert answers == ["a", "b"] * 20
    assert launcher.num_starts <= 6


async def test_an_unused_model_goes_to_sleep_and_the_next_request_wakes_it(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher, Sleepers())
    engine = await supervisor.ensure_ready("m")
    await until(lambda: engine.level == 1)
    assert await supervisor.ensure_ready("m") is engine
    assert engine.level == 0
    assert launcher.num_starts == 1


async def test_the_ladder_ends_on_disk(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher(), Sleepers(), rules=Rules(sleep_s=0.01))
    engine = await supervisor.ensure_ready("m")
    await until(lambda: not engine.is_alive)
    slot = supervisor.slot("m")
    assert slot is not None
    await until(lambda: slot.state is ModelState.ON_DISK)


@pytest.mark.parametrize("act", ["sleep", "wake"])
async def test_an_engine_that_fails_to_sleep_or_wake_is_ended(make_supervisor: MakeSupervisor, act: str) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher, Sleepers())
    first = await supervisor.ensure_ready("m")
    if act == "wake":
        await until(lambda: first.level == 1)
    first.fails = RuntimeError("out of memory")
    if act == "sleep":
        await until(lambda: not first.is_alive)
    else:
        with pytest.raises(ModelUnavailable, match="its last wake failed"):
            await supervisor.ensure_ready("m")
    assert not first.is_alive
    assert (await supervisor.ensure_ready("m")).is_alive


async def test_sleep_and_unload_by_hand_wait_for_those_inside(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher(), type("Patient", (Sleepers,), {"keep_alive_s": None})())
    async with supervisor.lease("m") as engine:
        sleeping = asyncio.create_task(supervisor.sleep("m", 2))
        await asyncio.sleep(0.01)
        assert engine.level == 0
    await sleeping
    assert engine.level == 2
    await supervisor.unload("m")
    assert not engine.is_alive


async def test_nobody_wakes_what_was_not_loaded(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher(), Sleepers())
    with pytest.raises(ModelUnavailable, match="not loaded"):
        await supervisor.sleep("m", 1)


async def test_drain_waits_for_open_requests(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher())
    async with supervisor.lease("m") as engine:
        draining = asyncio.create_task(supervisor.drain(60))
        await asyncio.sleep(0.01)
        assert engine.is_alive
        with pytest.raises(ModelUnavailable) as told:
            await supervisor.ensure_ready("m")
        assert told.value.code == "draining"
    await draining
    assert not engine.is_alive


async def test_drain_ends_a_load_that_hangs(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher(gate=asyncio.Event()))
    asking = asyncio.create_task(supervisor.ensure_ready("m"))
    await asyncio.sleep(0.01)
    await supervisor.drain(0)
    with pytest.raises(ModelUnavailable, match="shutting down"):
        await asking
    assert [slot.state for slot in supervisor.slots] == [ModelState.ON_DISK]


def test_backoff_doubles_up_to_its_limit_and_forgets() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(n) for n in (1, 2, 3, 100)] == [0.2, 0.4, 0.8, 30.0]
    assert backoff.count_failure(5, lived_s=1) == 6
    assert backoff.count_failure(5, lived_s=61) == 1


def test_a_state_cannot_be_skipped() -> None:
    with pytest.raises(IllegalTransition, match="m cannot go from on_disk to ready"):
        check_transition("m", ModelState.ON_DISK, ModelState.READY)
