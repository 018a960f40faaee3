"""Why a request does not go on: the reason as a value, and a sentence that names the thing and the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.core.insight.relief import Relief
from inferd.engine.insight.records import Reason
from inferd.engine.request import Request


@dataclass(frozen=True, slots=True)
class Why:
    reason: Reason
    text: str
    blocked_by: str | None = None  # id of the request that the text names
    eta_s: float | None = None  # until the reason is gone


@dataclass(frozen=True, slots=True)
class Ahead:
    """Who is before a request in the queue."""

    num_all: int
    num_own_later: int = 0  # of them: came later, of the same client
    num_other_lanes: int = 0  # of them: came later, because another lane was served less for its weight
    num_other_clients: int = 0  # of them: came later, because other clients of the lane were served less

    @property
    def num_later(self) -> int:
        return self.num_own_later + self.num_other_lanes + self.num_other_clients


def queue_order(ahead: Ahead) -> Why:
    if not ahead.num_all:
        return Why(Reason.QUEUE_ORDER, "the next step looks at it")
    later = f", {ahead.num_later} of a better priority" if ahead.num_later else ""
    return Why(Reason.QUEUE_ORDER, f"{_requests(ahead.num_all)} ahead{later}")


def lane_share(request: Request, ahead: Ahead, parts: float, all_parts: float) -> Why:
    """`parts`: the weight of the request's lane among that of all lanes that have work."""
    if ahead.num_other_lanes:
        num, whose = ahead.num_other_lanes, "of another lane"
        share = f"lane {request.lane} has {parts:g} of {all_parts:g} parts"
    else:
        num, whose = ahead.num_other_clients, "of other clients"
        share = f"client {request.client} has had its share"
    return Why(
        Reason.LANE_SHARE,
        f"{share}: {num} later {'request' if num == 1 else 'requests'} {whose} {'goes' if num == 1 else 'go'} first, "
        f"{_requests(ahead.num_all)} ahead",
    )


def kv_full(needed: int, available: int, relief: Relief | None) -> Why:
    text = f"needs {_blocks(needed)}, {available:,} free"
    if relief is None:
        return Why(Reason.KV_FULL, text)
    return _relieved(Reason.KV_FULL, text, relief, f"free {relief.amount:,}")


def blocks_given_up(victim: Request) -> Why:
    """Nobody starts in a step in which a running request had to go."""
    text = f"{_name(victim)} gave up its blocks in the last step; the next one looks again"
    return Why(Reason.KV_FULL, text, victim.request_id)


def seq_limit(num_running: int, limit: int, relief: Relief | None) -> Why:
    text = f"{num_running} of {limit} sequences run"
    if relief is None:
        return Why(Reason.SEQ_LIMIT, text)
    return _relieved(Reason.SEQ_LIMIT, text, relief, "end")


def token_budget(budget: int, num_requests: int) -> Why:
    return Why(Reason.TOKEN_BUDGET, f"the last step's {budget:,} tokens were taken by {_requests(num_requests)}")


def too_long_for_the_rest(needed: int, available: int) -> Why:
    """All of it has to be in one step."""
    return Why(Reason.TOKEN_BUDGET, f"needs {needed:,} tokens of one step, {available:,} were left of the last one")


def preempted(victim: Request, winner: Request | None) -> Why:
    again = f"will compute up to {victim.num_tokens:,} tokens again"
    if winner is not None:
        return Why(Reason.PREEMPTED, f"gave its blocks to {_name(winner)}; {again}", winner.request_id)
    if victim.preempted_for is None:
        return Why(Reason.PREEMPTED, f"found no free block and gave back its own; {again}")
    return Why(Reason.PREEMPTED, f"gave its blocks to a request that has ended since; {again}")


def grammar_compiling(kind: str, for_s: float) -> Why:
    return Why(Reason.GRAMMAR_COMPILING, f"its {kind} is being compiled, for {for_s:.1f} s now")


def paused_by(by: str, for_s: float) -> Why:
    return Why(Reason.PAUSED_BY, f"paused by {by} {duration(for_s)} ago")


def engine_paused(by: str, for_s: float) -> Why:
    return Why(Reason.PAUSED_BY, f"the engine was paused by {by} {duration(for_s)} ago")


def engine_sleeps(state: str) -> Why:
    return Why(Reason.MODEL_WAKING, f"the engine is {state}; it runs again when it is awake")


def adapter_slots(adapter: str, num_slots: int) -> Why:
    return Why(Reason.ADAPTER_SLOTS, f"adapter {adapter} waits for a place: {num_slots} of {num_slots} run")


def duration(seconds: float) -> str:
    """In one unit, rounded down."""
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h"


def _relieved(reason: Reason, text: str, relief: Relief, what: str) -> Why:
    """`what` they do, in the infinitive."""
    in_s = f"{relief.in_s:.1f}" if relief.in_s < 10 else f"{relief.in_s:,.0f}"
    num, name = relief.num_others, _name(relief.request)
    who, verb = (name, "is") if not num else (f"{name} and {num} other{'s' if num > 1 else ''}", "are")
    when = f"in about {in_s} s" if relief.is_certain else f"within {in_s} s"
    text = f"{text}; {who} {verb} expected to {what} {when}"
    return Why(reason, text, relief.request.request_id, relief.in_s)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count:,} blocks"


def _name(request: Request) -> str:
    return request.name
