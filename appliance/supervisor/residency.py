"""Which models are loaded, which go to sleep, and who waits for whom: one pure function over a snapshot.

Those who wait are served in the order in which they came. Each gets, in this order of preference: room that is free;
room that is about to be; the room of models that nobody uses; the room of a model in use, which then lets nobody else
in, once it has served for its stay. So requests for two models that do not fit together are served in turns, many at a
time, and nobody waits longer than a stay and a load. What a model holds is never taken while a request is inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from inferd.appliance.supervisor.room import GIB, Room, find_room, fits, sleep_level
from inferd.appliance.supervisor.states import ModelState
from inferd.appliance.supervisor.world import (
    SLOTS,
    Act,
    Decision,
    Hold,
    Holding,
    Load,
    ModelView,
    Refuse,
    Release,
    Sleep,
    Unload,
    World,
)

ASLEEP = (ModelState.SLEEPING_1, ModelState.SLEEPING_2)
LEAVING = (ModelState.DRAINING, ModelState.STOPPING)


def decide(world: World) -> Decision:
    plan = _Plan(world)
    for view in sorted((view for view in world.models if view.is_wanted), key=lambda view: view.waiting_since):
        plan.make_room(view)
    plan.release()
    plan.step_down()
    return plan.decision()


class _Plan:
    def __init__(self, world: World) -> None:
        self._world = world
        self._now = world.now
        self._free = world.free()  # less what is promised to those before
        self._acts: list[Act] = []
        self._timers: list[float] = []
        self._waits_for: dict[str, tuple[str, ...]] = {}
        self._going = {view.model for view in world.models if view.state in LEAVING}
        self._held: set[str] = set()

    def decision(self) -> Decision:
        later = [when for when in self._timers if when > self._now]
        return Decision(tuple(self._acts), min(later, default=None), self._waits_for)

    def make_room(self, view: ModelView) -> None:
        if view.retry_at > self._now:
            self._timers.append(view.retry_at)
            return
        by_need = {_frozen(_beyond(option, view.holds)): option for option in view.options}
        needs = [dict(need) for need in by_need]
        if (room := find_room(needs, self._free, (), self._now)) is not None:
            self._acts.append(Load(view.model, by_need[_frozen(room.placement)]))
            self._promise(room.placement)
        elif (room := find_room(needs, self._soon(), self._idle(view), self._now)) is not None:
            self._send_away(view, room)
            self._promise(room.placement)
        else:
            self._wait_for_busy(view, needs)

    def _send_away(self, view: ModelView, room: Room) -> None:
        why = f"makes room for {view.model}"
        for victim in room.victims:
            self._dismiss(victim, sleep_level(victim, self._free, room.placement), why)
        leaving = [other.model for other in self._world.models if other.model in self._going]
        self._waits_for[view.model] = tuple(leaving)

    def _wait_for_busy(self, view: ModelView, needs: list[dict[str, int]]) -> None:
        """Holds back those in use whose stay is over; looks again when the next stay ends."""
        if not self._fits_ever(view):
            self._acts.append(Refuse(view.model, self._why_never(view)))
            return
        busy = [other for other in self._world.models if self._is_busy(other, view)]
        over = [other for other in busy if self._stay_ends(other, view) <= self._now]
        room = find_room(needs, self._soon(), [*self._idle(view), *over], self._now)
        if room is None:
            self._timers += [ends for other in busy if (ends := self._stay_ends(other, view)) > self._now]
            self._waits_for[view.model] = tuple(other.model for other in busy)
            self._promise(needs[0])
            return
        in_use = [victim for victim in room.victims if victim in busy]
        self._waits_for[view.model] = tuple(victim.model for victim in in_use)
        for victim in in_use:
            self._held.add(victim.model)
            if not victim.held:
                self._acts.append(Hold(victim.model, view.model))
        self._promise(room.placement)

    def release(self) -> None:
        """Whoever was held back for somebody that does not need it any more."""
        for view in self._world.models:
            if view.held and view.model not in self._held and view.model not in self._going:
                self._acts.append(Release(view.model))

    def step_down(self) -> None:
        """One rung for each model that nobody has used for its time."""
        for view in self._world.models:
            ends = self._rest_ends(view)
            if ends is None or view.model in self._going:
                continue
            if ends > self._now:
                self._timers.append(ends)
                continue
            why = f"not used for {max(self._now - view.last_used, 0.0):.0f} s"
            level = None if view.keep_alive_s == 0 else sleep_level(view, self._free, _memory(view.holds))
            self._dismiss(view, level, why)

    def _dismiss(self, view: ModelView, level: int | None, why: str) -> None:
        self._going.add(view.model)
        if level is None or view.asleep is None:
            self._acts.append(Unload(view.model, why))
        else:
            self._acts.append(Sleep(view.model, level, why))
            self._promise(_beyond(view.asleep[level - 1], view.holds))

    def _rest_ends(self, view: ModelView) -> float | None:
        if view.pinned or view.num_waiting or view.num_open or view.keep_alive_s is None:
            return None
        if view.state is ModelState.READY:
            return max(view.last_used, view.since) + view.keep_alive_s
        return view.since + self._world.rules.sleep_s if view.state in ASLEEP else None

    def _idle(self, other_than: ModelView) -> list[ModelView]:
        """Those that can be sent away at once."""
        return [
            view
            for view in self._world.models
            if (view.is_idle or (view.state in ASLEEP and not view.num_waiting))
            and self._is_candidate(view, other_than)
        ]

    def _is_busy(self, view: ModelView, other_than: ModelView) -> bool:
        arriving = view.state in (ModelState.LOADING, ModelState.WAKING)
        in_use = view.state is ModelState.READY and not view.is_idle
        return (in_use or arriving) and self._is_candidate(view, other_than)

    def _is_candidate(self, view: ModelView, other_than: ModelView) -> bool:
        return not view.pinned and view.model != other_than.model and view.model not in self._going

    def _stay_ends(self, view: ModelView, waiting: ModelView) -> float:
        """One that is still loading has its stay before it, and is never held back before it is ready."""
        if view.state is not ModelState.READY:
            return float("inf")
        rules = self._world.rules
        stay_s = max(rules.min_stay_s, rules.stay_per_load * view.load_s)
        return min(view.since + stay_s, waiting.waiting_since + rules.max_wait_s)

    def _soon(self) -> dict[str, int]:
        """What is free once those that leave are gone."""
        left = dict(self._free)
        for view in self._world.models:
            if view.model in self._going:
                for pool, amount in view.holds.items():
                    left[pool] = left.get(pool, 0) + amount
        return left

    def _promise(self, need: Holding) -> None:
        for pool, amount in need.items():
            self._free[pool] = self._free.get(pool, 0) - amount

    def _fits_ever(self, view: ModelView) -> bool:
        """Whether it would fit if everything that may be moved were gone."""
        left = dict(self._world.capacity)
        for other in self._pinned(view):
            for pool, amount in other.holds.items():
                left[pool] = left.get(pool, 0) - amount
        return any(fits(option, left) for option in view.options)

    def _pinned(self, view: ModelView) -> list[ModelView]:
        return [other for other in self._world.models if other.pinned and other.holds and other.model != view.model]

    def _why_never(self, view: ModelView) -> str:
        if not view.options:
            return f"{view.model} has no placement on this machine"
        needs = f"{view.model} needs {_amounts(view.options[0])}"
        if any(fits(option, self._world.capacity) for option in view.options):
            names = ", ".join(other.model for other in self._pinned(view))
            return f"{needs}, and what is pinned leaves too little: {names}"
        return f"{needs}, and models may have {_amounts(self._world.capacity)} here"


def _beyond(option: Holding, holds: Holding) -> dict[str, int]:
    """What a placement takes on top of what its model already holds."""
    return {pool: max(amount - holds.get(pool, 0), 0) for pool, amount in option.items()}


def _memory(holds: Holding) -> dict[str, int]:
    return {pool: amount for pool, amount in holds.items() if pool != SLOTS}


def _frozen(need: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(need.items()))


def _amounts(amounts: Mapping[str, int]) -> str:
    def one(pool: str, amount: int) -> str:
        if pool == SLOTS:
            return f"{amount} place" if amount == 1 else f"{amount} places"
        return f"{amount / GIB:.1f} GiB of {pool}"

    pools: Iterable[str] = sorted(amounts, key=lambda pool: pool == SLOTS)
    return " and ".join(one(pool, amounts[pool]) for pool in pools)
