"""Engines are started, watched, started again, and stopped to make room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from inferd.appliance.supervisor.backoff import Backoff
from inferd.appliance.supervisor.errors import ModelUnavailable
from inferd.appliance.supervisor.policy import LoadedModel, choose_victim
from inferd.appliance.supervisor.states import IllegalTransition, ModelState, check_transition
from inferd.appliance.supervisor.supervisor import Supervisor
from inferd.engine.errors import LoadError

QUICK = Backoff(first_s=0.01, longest_s=0.02)


class FakeEngine:
    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.drained_s: float | None = None

    @property
    def is_alive(self) -> bool:
        return not self.gone.is_set()

    async def wait_dead(self) -> None:
        await self.gone.wait()

    async def shutdown(self, drain_s: float) -> None:
        self.drained_s = drain_s
        self.gone.set()


@dataclass
class Launcher:
    """Starts fake engines; `failures` are raised first, `gate` holds every start back until it is set."""

    failures: list[Exception] = field(default_factory=list)
    gate: asyncio.Event | None = None
    started: list[FakeEngine] = field(default_factory=list)

    async def __call__(self, model: str) -> FakeEngine:
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.started.append(FakeEngine())
        return self.started[-1]


MakeSupervisor = Callable[..., Supervisor[FakeEngine]]


@pytest.fixture
async def make_supervisor() -> AsyncIterator[MakeSupervisor]:
    made: list[Supervisor[FakeEngine]] = []

    def make(start: Callable[[str], Awaitable[FakeEngine]], **options: object) -> Supervisor[FakeEngine]:
        made.append(Supervisor(start, **({"backoff": QUICK} | options)))  # type: ignore[arg-type]
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
    assert told.value.retry_after_s > 0


async def test_a_dead_engine_is_started_again(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher()
    supervisor = make_supervisor(launcher)
    first = await supervisor.ensure_ready("m")
    first.gone.set()
    second = await supervisor.ensure_ready("m")
    assert second is not first
    assert second.is_alive


async def test_a_failed_start_is_tried_again_for_a_waiter(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher(failures=[RuntimeError("no memory"), RuntimeError("no memory")])
    supervisor = make_supervisor(launcher)
    assert (await supervisor.ensure_ready("m")).is_alive


async def test_a_start_that_cannot_succeed_gives_its_reason(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher(failures=[LoadError("/models/m/model.safetensors: tensor lm_head.weight is missing")])
    supervisor = make_supervisor(launcher)
    slot = await supervisor.load("m")
    with pytest.raises(ModelUnavailable, match="load_error") as told:
        await supervisor.ensure_ready("m")
    assert "/models" not in str(told.value)
    assert slot.failure is not None
    assert "lm_head.weight is missing" in str(slot.failure.error)
    assert launcher.started == []
    assert (await supervisor.ensure_ready("m")).is_alive  # asked again after the cool-down


async def test_cool_down_refuses_with_the_time_left(make_supervisor: MakeSupervisor) -> None:
    launcher = Launcher(failures=[RuntimeError("x")])
    supervisor = make_supervisor(launcher, backoff=Backoff(first_s=20, longest_s=20))
    slot = await supervisor.load("m")
    await until(lambda: slot.state is ModelState.FAILED)
    assert slot.is_down
    with pytest.raises(ModelUnavailable) as told:
        await supervisor.ensure_ready("m")
    assert 0 < told.value.retry_after_s <= 20


async def test_an_idle_model_makes_room(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher())
    first = await supervisor.ensure_ready("a")
    await supervisor.ensure_ready("b")
    assert not first.is_alive
    assert [slot.model for slot in supervisor.slots] == ["b"]


async def test_a_model_in_use_keeps_its_room(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(Launcher())
    async with supervisor.lease("a") as engine:
        with pytest.raises(ModelUnavailable, match="a is in use"):
            await supervisor.ensure_ready("b")
        assert engine.is_alive
    assert (await supervisor.ensure_ready("b")).is_alive


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
    slot = await supervisor.load("m")
    await supervisor.drain(0)
    assert slot.state is ModelState.ON_DISK


def test_backoff_doubles_up_to_its_limit_and_forgets() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(n) for n in (1, 2, 3, 100)] == [0.2, 0.4, 0.8, 30.0]
    assert backoff.count_failure(5, lived_s=1) == 6
    assert backoff.count_failure(5, lived_s=61) == 1


def test_victim_is_idle_and_least_recently_used() -> None:
    loaded = [LoadedModel("busy", 1, 0.0), LoadedModel("new", 0, 9.0), LoadedModel("old", 0, 1.0)]
    assert choose_victim(loaded) == "old"
    assert choose_victim(loaded[:1]) is None


def test_a_state_cannot_be_skipped() -> None:
    with pytest.raises(IllegalTransition, match="m cannot go from on_disk to ready"):
        check_transition("m", ModelState.ON_DISK, ModelState.READY)
