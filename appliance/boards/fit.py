"""Would a model fit now, and what would it cost: asked of the same policy that would do it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from inferd.appliance.memory.planner import MemoryPlanner
from inferd.appliance.supervisor.residency import decide
from inferd.appliance.supervisor.states import RESTING, ModelState
from inferd.appliance.supervisor.supervisor import Supervisor
from inferd.appliance.supervisor.world import Hold, Holding, ModelView, Refuse, Sleep, Unload, World


class FitAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and tokens. `evicts` go for it at once, `waits_for` are in use and would have to be waited for."""

    model: str
    fits: bool
    is_loaded: bool
    weights: int
    kv: int
    workspace: int
    total: int
    context: int
    longest_context: int  # of one request, if every other model were gone
    evicts: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()
    why_not: str = ""


def fit(supervisor: Supervisor[Any], planner: MemoryPlanner, model: str, context: int | None) -> FitAnswer:
    """`context`: tokens of one request that must have room; None: what the model would be loaded with."""
    needs, world = planner.needs(model), supervisor.world()
    guess, now = needs.estimate, time.monotonic()
    kv = guess.kv if context is None else guess.kv_bytes(min(context, guess.context_limit))
    known = next((view for view in world.models if view.model == model), None)
    is_loaded = known is not None and known.state not in RESTING
    others = tuple(view for view in world.models if view.model != model)
    asked = ModelView(
        model,
        ModelState.ON_DISK if known is None or is_loaded else known.state,
        options=tuple(_with_more(option, guess.total, kv - guess.kv) for option in needs.options),
        holds={} if known is None or is_loaded else known.holds,
        num_waiting=1,
        waiting_since=now,
    )
    decision = decide(World(now, world.capacity, (*others, asked), world.rules))
    refusal = next((act.why for act in decision.acts if isinstance(act, Refuse) and act.model == model), "")
    held = tuple(act.model for act in decision.acts if isinstance(act, Hold))
    capacity = max((amount for pool, amount in world.capacity.items() if pool != "slots"), default=0)
    return FitAnswer(
        model=model,
        fits=is_loaded or not refusal,
        is_loaded=is_loaded,
        weights=guess.weights,
        kv=kv,
        workspace=guess.workspace,
        total=guess.fixed + kv,
        context=guess.context_limit if context is None else context,
        longest_context=guess.longest_context(capacity),
        evicts=tuple(act.model for act in decision.acts if isinstance(act, Sleep | Unload) and model in act.why),
        waits_for=held or decision.waits_for.get(model, ()),
        why_not="" if is_loaded else refusal,
    )


def _with_more(option: Holding, total: int, extra: int) -> dict[str, int]:
    """The pool that holds the weights holds the keys and values as well."""
    return {pool: amount + (extra if amount == total else 0) for pool, amount in option.items()}
