"""What the residency policy looks at, and what it may decide: frozen values, no clocks, no processes.

Memory is counted in pools: one a GPU (its uuid), "host" for main memory, and "slots" for the number of models that may
be loaded at all. What a model needs or holds is a number for each pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inferd.appliance.supervisor.states import ModelState

HOST = "host"
SLOTS = "slots"
Holding = Mapping[str, int]  # pool → bytes, or a count for "slots"


@dataclass(frozen=True)
class Rules:
    """Seconds; what an appliance's owner may set."""

    sleep_s: float = 3600.0  # after that long at one level of sleep, the next rung
    min_stay_s: float = 1.0  # a loaded model serves at least that long before it is held back for another one,
    stay_per_load: float = 2.0  # and at least that many times its own load
    max_wait_s: float = 30.0  # whoever waited that long for room is served next, whatever the stay


@dataclass(frozen=True)
class Limits:
    """What an appliance's owner may change while models are served."""

    rules: Rules = Rules()
    load_timeout_s: float = 300.0  # the longest that a request waits for its model


@dataclass(frozen=True)
class ModelView:
    """One model as it stands. Times are of one monotonic clock."""

    model: str
    state: ModelState
    options: tuple[Holding, ...] = ()  # the placements that would do, the preferred one first
    holds: Holding = field(default_factory=dict)  # while it falls asleep: also what it will hold then
    asleep: tuple[Holding, Holding] | None = None  # what it holds at level 1 and 2; None: its engine cannot sleep
    num_open: int = 0  # requests inside
    num_waiting: int = 0  # requests before the door
    waiting_since: float = 0.0  # of the oldest of them
    last_used: float = 0.0
    since: float = 0.0  # in this state
    load_s: float = 1.0  # what a load took, or is expected to take
    keep_alive_s: float | None = 600.0  # None: for ever
    pinned: bool = False
    held: bool = False  # nobody is let in any more
    retry_at: float = 0.0  # a model whose load failed is not tried before

    @property
    def is_idle(self) -> bool:
        """Ready or asleep, and nobody is inside or will be let in."""
        nobody = self.num_open == 0 and (self.num_waiting == 0 or self.held)
        return self.state is ModelState.READY and nobody

    @property
    def is_wanted(self) -> bool:
        """Somebody waits for it, and it is neither there nor on its way."""
        resting = (ModelState.ON_DISK, ModelState.FAILED, ModelState.SLEEPING_1, ModelState.SLEEPING_2)
        return self.num_waiting > 0 and self.state in resting


@dataclass(frozen=True)
class World:
    now: float
    capacity: Holding  # of each pool: what all models together may hold
    models: tuple[ModelView, ...]
    rules: Rules = Rules()

    def free(self) -> dict[str, int]:
        left = dict(self.capacity)
        for view in self.models:
            for pool, amount in view.holds.items():
                left[pool] = left.get(pool, 0) - amount
        return left

    def find(self, model: str) -> ModelView:
        return next(view for view in self.models if view.model == model)


@dataclass(frozen=True)
class Load:
    """From disk, or out of sleep."""

    model: str
    placement: Holding


@dataclass(frozen=True)
class Sleep:
    model: str
    level: int
    why: str


@dataclass(frozen=True)
class Unload:
    model: str
    why: str


@dataclass(frozen=True)
class Hold:
    """Let nobody in any more: it makes room for `other` once those inside are through."""

    model: str
    other: str


@dataclass(frozen=True)
class Release:
    model: str


@dataclass(frozen=True)
class Refuse:
    """It cannot be loaded, however long it waits."""

    model: str
    why: str


Act = Load | Sleep | Unload | Hold | Release | Refuse


@dataclass(frozen=True)
class Decision:
    acts: tuple[Act, ...]
    look_again_at: float | None  # when time alone may change the answer
    waits_for: Mapping[str, tuple[str, ...]]  # model → those that make room for it
