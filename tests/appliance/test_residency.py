"""The residency policy, in simulated time: loads take seconds there that nobody waits for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.appliance.supervisor.residency import decide
from inferd.appliance.supervisor.states import ModelState, check_transition
from inferd.appliance.supervisor.world import (
    HOST,
    SLOTS,
    Hold,
    Holding,
    Load,
    ModelView,
    Refuse,
    Release,
    Rules,
    Sleep,
    Unload,
    World,
)

GIB = 1 << 30
GPU = "gpu-0"
S = ModelState


def model(name: str, gib: int = 10, **changes: object) -> ModelView:
    return replace(ModelView(name, S.ON_DISK, options=({GPU: gib * GIB},), asleep=({HOST: gib * GIB}, {})), **changes)  # type: ignore[arg-type]


def ready(name: str, gib: int = 10, **changes: object) -> ModelView:
    return model(name, gib, **{"state": S.READY, "holds": {GPU: gib * GIB}, **changes})


def world(*models: ModelView, now: float = 1000.0, gpu: int = 16, host: int = 64, rules: Rules | None = None) -> World:
    return World(now, {GPU: gpu * GIB, HOST: host * GIB}, models, rules or Rules())


def test_free_room_is_taken_at_once() -> None:
    assert decide(world(model("a", num_waiting=1))).acts == (Load("a", {GPU: 10 * GIB}),)


def test_the_least_valuable_of_the_idle_goes_to_sleep() -> None:
    decision = decide(
        world(
            ready("old", 6, last_used=0.0),
            ready("fresh", 6, last_used=990.0),
            model("new", 10, num_waiting=1),
        )
    )
    assert decision.acts == (Sleep("old", 1, "makes room for new"),)
    assert decision.waits_for == {"new": ("old",)}


def test_one_that_takes_long_to_load_is_worth_more() -> None:
    decision = decide(
        world(
            ready("slow", 8, last_used=500.0, load_s=100.0),
            ready("quick", 8, last_used=600.0, load_s=1.0),
            model("new", 8, num_waiting=1),
        )
    )
    assert [act.model for act in decision.acts] == ["quick"]


def test_no_more_go_than_must() -> None:
    decision = decide(
        world(
            ready("small", 2, last_used=500.0),
            ready("large", 12, last_used=900.0),
            model("new", 10, num_waiting=1),
        )
    )
    assert [act.model for act in decision.acts] == ["large"]


def test_without_room_for_a_sleeping_copy_the_second_level_is_next() -> None:
    decision = decide(world(ready("a", 10), model("b", 10, num_waiting=1), host=4))
    assert decision.acts == (Sleep("a", 2, "makes room for b"),)


def test_an_engine_that_cannot_sleep_is_unloaded() -> None:
    decision = decide(world(ready("a", 10, asleep=None), model("b", 10, num_waiting=1)))
    assert decision.acts == (Unload("a", "makes room for b"),)


def test_a_pinned_model_stays_and_the_refusal_names_it() -> None:
    (act,) = decide(world(ready("a", 10, pinned=True), model("b", 10, num_waiting=1))).acts
    assert isinstance(act, Refuse)
    assert "pinned" in act.why
    assert "a" in act.why.split(": ")[1]


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    (act,) = decide(world(model("b", 20, num_waiting=1))).acts
    assert act == Refuse(
        "b", "b needs 20.0 GiB of gpu-0, and models may have 16.0 GiB of gpu-0 and 64.0 GiB of host here"
    )


def test_the_busy_are_not_touched_before_their_stay_is_over() -> None:
    busy = ready("a", 10, num_open=1, since=999.5, load_s=2.0)
    decision = decide(world(busy, model("b", 10, num_waiting=1, waiting_since=999.9)))
    assert decision.acts == ()
    assert decision.look_again_at == pytest.approx(1003.5)
    later = decide(world(busy, model("b", 10, num_waiting=1, waiting_since=999.9), now=1003.5))
    assert later.acts == (Hold("a", "b"),)


def test_one_held_back_goes_once_nobody_is_inside() -> None:
    held = ready("a", 10, num_open=1, held=True, num_waiting=3)
    waiting = model("b", 10, num_waiting=1, waiting_since=900.0)
    assert decide(world(held, waiting)).acts == ()
    assert decide(world(replace(held, num_open=0), waiting)).acts == (Sleep("a", 1, "makes room for b"),)


def test_one_held_back_for_nobody_is_released() -> None:
    assert decide(world(ready("a", 10, held=True, num_open=1))).acts == (Release("a"),)


def test_a_failed_model_waits_for_its_cool_down() -> None:
    decision = decide(world(model("a", num_waiting=1, state=S.FAILED, retry_at=1010.0)))
    assert decision.acts == ()
    assert decision.look_again_at == 1010.0


def test_whoever_came_first_is_not_overtaken_by_a_smaller_one() -> None:
    decision = decide(
        world(
            ready("a", 10, num_open=1, since=0.0),
            model("large", 12, num_waiting=1, waiting_since=990.0),
            model("small", 6, num_waiting=1, waiting_since=995.0),
        )
    )
    assert decision.acts == (Hold("a", "large"),)


@pytest.mark.parametrize(
    ("view", "acts"),
    [
        (ready("a", last_used=300.0), (Sleep("a", 1, "not used for 700 s"),)),
        (ready("a", last_used=300.0, keep_alive_s=None), ()),
        (ready("a", last_used=300.0, pinned=True), ()),
        (ready("a", last_used=300.0, num_open=1), ()),
        (ready("a", last_used=999.0, keep_alive_s=0), (Unload("a", "not used for 1 s"),)),
        (
            model("a", state=S.SLEEPING_1, holds={HOST: 10 * GIB}, since=-3000.0),
            (Sleep("a", 2, "not used for 1000 s"),),
        ),
        (model("a", state=S.SLEEPING_2, since=-3000.0), (Unload("a", "not used for 1000 s"),)),
    ],
)
def test_the_ladder(view: ModelView, acts: tuple[object, ...]) -> None:
    assert decide(world(view)).acts == acts


def test_waking_needs_only_what_it_does_not_hold() -> None:
    asleep = model("a", 10, state=S.SLEEPING_1, holds={HOST: 10 * GIB}, num_waiting=1)
    assert decide(world(asleep, host=10)).acts == (Load("a", {GPU: 10 * GIB}),)


def test_a_number_of_models_is_a_pool_like_any_other() -> None:
    one = ready("a", 1, holds={GPU: GIB, SLOTS: 1}, last_used=0.0)
    two = model("b", 1, options=({GPU: GIB, SLOTS: 1},), num_waiting=1)
    (act,) = decide(World(1000.0, {GPU: 16 * GIB, HOST: 64 * GIB, SLOTS: 1}, (one, two))).acts
    assert act == Sleep("a", 1, "makes room for b")


@dataclass
class Sim:
    """Models whose loads and requests take simulated time; it does what `decide` says."""

    capacity: Holding
    rules: Rules
    now: float = 0.0
    models: dict[str, ModelView] = field(default_factory=dict)
    arrivals: list[tuple[float, str, float]] = field(default_factory=list)  # when, model, how long
    waiting: list[tuple[float, str, float]] = field(default_factory=list)
    inside: list[tuple[float, str]] = field(default_factory=list)  # when it ends, model
    moves: list[tuple[float, str, ModelState, Holding]] = field(default_factory=list)
    done: list[float] = field(default_factory=list)  # how long each waited
    refused: list[str] = field(default_factory=list)
    num_loads: int = 0

    def set(self, name: str, **changes: object) -> None:
        self.models[name] = replace(self.models[name], **changes)  # type: ignore[arg-type]

    def move(self, name: str, state: ModelState, **changes: object) -> None:
        check_transition(name, self.models[name].state, state)
        self.set(name, state=state, since=self.now, **changes)

    def run(self, until: float) -> None:
        while self.now <= until:
            self._happen()
            self._admit()
            decision = decide(World(self.now, self.capacity, tuple(self.models.values()), self.rules))
            for act in decision.acts:
                self._act(act)
            self._admit()
            self._check()
            times = [decision.look_again_at] if decision.look_again_at is not None else []
            times += [arrival[0] for arrival in self.arrivals] + [end for end, _ in self.inside]
            times += [when for when, *_ in self.moves]
            if not times:
                return
            self.now = max(min(times), self.now + 1e-6)

    def _happen(self) -> None:
        self.waiting += sorted(arrival for arrival in self.arrivals if arrival[0] <= self.now)
        self.arrivals = [arrival for arrival in self.arrivals if arrival[0] > self.now]
        for end, name in [entry for entry in self.inside if entry[0] <= self.now]:
            self.inside.remove((end, name))
            self.set(name, num_open=self.models[name].num_open - 1, last_used=self.now)
        for entry in [entry for entry in self.moves if entry[0] <= self.now]:
            self.moves.remove(entry)
            self.move(entry[1], entry[2], holds=entry[3], held=False)
            if entry[2] is S.STOPPING:
                self.move(entry[1], S.ON_DISK, holds={})

    def _admit(self) -> None:
        for arrival in list(self.waiting):
            when, name, length = arrival
            view = self.models[name]
            if view.state is S.READY and not view.held:
                self.waiting.remove(arrival)
                self.inside.append((self.now + length, name))
                self.done.append(self.now - when)
                self.set(name, num_open=view.num_open + 1, last_used=self.now)
        for name in self.models:
            mine = [when for when, wanted, _ in self.waiting if wanted == name]
            self.set(name, num_waiting=len(mine), waiting_since=min(mine, default=0.0))

    def _act(self, act: object) -> None:
        match act:
            case Load(name, placement):
                view = self.models[name]
                self.num_loads += 1
                after = S.LOADING if view.state in (S.ON_DISK, S.FAILED) else S.WAKING
                self.move(name, after, holds={**view.holds, **placement})
                self.moves.append((self.now + view.load_s, name, S.READY, placement))
            case Sleep(name, level, _):
                view = self.models[name]
                assert view.asleep is not None
                goal = (S.SLEEPING_1, S.SLEEPING_2)[level - 1]
                if view.state is S.READY:
                    self.move(name, S.DRAINING, holds={**view.holds, **view.asleep[level - 1]})
                    self.moves.append((self.now + 0.5, name, goal, view.asleep[level - 1]))
                else:
                    self.move(name, goal, holds=view.asleep[level - 1])
            case Unload(name, _):
                if self.models[name].state is S.READY:
                    self.move(name, S.DRAINING)
                    self.moves.append((self.now + 0.5, name, S.STOPPING, {}))
                else:
                    self.move(name, S.STOPPING)
                    self.move(name, S.ON_DISK, holds={})
            case Hold(name, _):
                self.set(name, held=True)
            case Release(name):
                self.set(name, held=False)
            case Refuse(name, _):
                self.refused += [name for arrival in self.waiting if arrival[1] == name]
                self.waiting = [arrival for arrival in self.waiting if arrival[1] != name]

    def _check(self) -> None:
        for pool, capacity in self.capacity.items():
            used = sum(view.holds.get(pool, 0) for view in self.models.values())
            assert used <= capacity, f"{pool} is overbooked at {self.now}"
        for view in self.models.values():
            assert view.num_open == 0 or view.state is S.READY, f"{view.model} was moved while in use"


def test_two_models_that_do_not_fit_together_take_turns() -> None:
    sim = Sim({GPU: 10 * GIB, HOST: 0}, Rules())
    for name in "ab":
        sim.models[name] = model(name, 10, load_s=2.0, asleep=None)
    sim.arrivals = [(0.05 * index, "ab"[index % 2], 0.5) for index in range(40)]
    sim.run(until=1000.0)
    assert len(sim.done) == 40
    assert sim.num_loads <= 4
    assert max(sim.done) < 15.0


sizes = st.integers(1, 12)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(sizes, st.booleans(), st.booleans(), st.sampled_from([0.2, 2.0, 20.0])), min_size=1, max_size=5),
    st.integers(0, 30),
    st.randoms(use_true_random=False),
    st.sampled_from([None, 0.0, 3.0, 60.0]),
)
def test_everybody_is_served_and_no_pool_is_overbooked(
    kinds: list[tuple[int, bool, bool, float]], host: int, chance: random.Random, keep_alive_s: float | None
) -> None:
    sim = Sim({GPU: 12 * GIB, HOST: host * GIB}, Rules(sleep_s=30.0, max_wait_s=20.0))
    room_for_pins = 12
    for index, (gib, can_sleep, wants_pin, load_s) in enumerate(kinds):
        pinned = wants_pin and index == 0 and gib < 4
        room_for_pins -= gib if pinned else 0
        asleep: tuple[Holding, Holding] | None = ({HOST: gib * GIB}, {}) if can_sleep else None
        name = str(index)
        view = model(name, gib, load_s=load_s, pinned=pinned, asleep=asleep, keep_alive_s=keep_alive_s)
        sim.models[name] = view
    names = list(sim.models)
    sim.arrivals = [(chance.uniform(0, 60), chance.choice(names), chance.uniform(0.1, 8)) for _ in range(30)]
    sim.run(until=5000.0)
    never = {
        name for name in names if sim.models[name].options[0][GPU] > room_for_pins * GIB and not sim.models[name].pinned
    }
    assert set(sim.refused) <= never
    assert len(sim.done) + len(sim.refused) == 30
    assert not sim.waiting
