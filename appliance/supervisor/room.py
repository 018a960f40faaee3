"""Where a model fits, and who has to go for it: pure arithmetic over pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inferd.appliance.supervisor.states import ModelState
from inferd.appliance.supervisor.world import HOST, Holding, ModelView

GIB = 1 << 30


@dataclass(frozen=True)
class Room:
    placement: Holding
    victims: tuple[ModelView, ...]  # in the order in which they are worth least


def fits(need: Holding, free: Mapping[str, int]) -> bool:
    return all(free.get(pool, 0) >= amount for pool, amount in need.items())


def find_room(
    options: Sequence[Holding], free: Mapping[str, int], candidates: Iterable[ModelView], now: float
) -> Room | None:
    """The first placement that fits as things are, else the one whose victims are worth least together.

    None when no placement fits even without all `candidates`.
    """
    for placement in options:
        if fits(placement, free):
            return Room(placement, ())
    by_worth = sorted(candidates, key=lambda view: (worth(view, now), view.model))
    rooms = [room for placement in options if (room := _evicting(placement, free, by_worth)) is not None]
    return min(rooms, key=lambda room: sum(worth(view, now) for view in room.victims), default=None)


def worth(view: ModelView, now: float) -> float:
    """How much would be lost: seconds of load for each second of idleness, and for each GiB that is set free.

    A model that nobody used for an hour and that loads in a second goes before one used a minute ago; of two alike,
    the larger goes, because one victim is better than several.
    """
    idle_s = max(now - view.last_used, 0.0) + 1.0
    size_gib = max(freed_bytes(view) / GIB, 0.001)
    return view.load_s / idle_s / size_gib


def freed_bytes(view: ModelView) -> int:
    return sum(amount for pool, amount in view.holds.items() if pool != "slots")


def sleep_level(view: ModelView, free: Mapping[str, int], needed: Holding) -> int | None:
    """The lightest sleep that frees what `needed` asks for and that main memory has room for; None: it must go."""
    if view.asleep is None or view.state is ModelState.SLEEPING_2:
        return None
    first = 2 if view.state is ModelState.SLEEPING_1 else 1
    for level in range(first, 3):
        holding = view.asleep[level - 1]
        after = {pool: free.get(pool, 0) + view.holds.get(pool, 0) - holding.get(pool, 0) for pool in {*free, HOST}}
        freed_in = {pool for pool in needed if view.holds.get(pool, 0) > holding.get(pool, 0)}
        if after[HOST] >= 0 and freed_in == {pool for pool in needed if view.holds.get(pool, 0) > 0}:
            return level
    return None


def _evicting(placement: Holding, free: Mapping[str, int], by_worth: Sequence[ModelView]) -> Room | None:
    """Takes the least valuable until it fits, then gives back those that turn out not to be needed."""
    useful = [view for view in by_worth if any(view.holds.get(pool, 0) > 0 for pool in placement)]
    victims: list[ModelView] = []
    for view in useful:
        if fits(placement, _freed(free, victims)):
            break
        victims.append(view)
    if not fits(placement, _freed(free, victims)):
        return None
    for view in sorted(victims, key=freed_bytes):
        rest = [victim for victim in victims if victim is not view]
        if fits(placement, _freed(free, rest)):
            victims = rest
    return Room(placement, tuple(victims))


def _freed(free: Mapping[str, int], victims: Iterable[ModelView]) -> dict[str, int]:
    left = dict(free)
    for view in victims:
        for pool, amount in view.holds.items():
            left[pool] = left.get(pool, 0) + amount
    return left
