"""Why a request does not start now, as a value: the place that refuses knows the resource and the numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from inferd.engine.request import Request


class WaitReason(enum.Enum):
    KV_FULL = "kv_full"  # blocks
    SEQ_LIMIT = "seq_limit"  # running requests
    TOKEN_BUDGET = "token_budget"  # tokens of this step
    PREEMPTION = "preemption"  # this step took blocks from running requests, and those who gave must not see newcomers
    TOKEN_ON_ITS_WAY = "token_on_its_way"  # preempted while its newest token was computed, which comes first
    PAUSED = "paused"
    GRAMMAR_COMPILING = "grammar_compiling"
    ADAPTER_SLOTS = "adapter_slots"  # adapters that run requests, this one's among them


@dataclass(frozen=True, slots=True)
class Refusal:
    """`needed` and `available` are in units of the reason, where it has any."""

    reason: WaitReason
    needed: int = 0
    available: int = 0


class AdmissionGate(Protocol):
    """Something beside blocks, budget and places that a request may have to wait for, by itself.

    Those behind it in the queue pass it meanwhile. Asked again at every step.
    """

    def refusal(self, request: Request) -> Refusal | None: ...


class PauseState(enum.Enum):
    """What `Scheduler.schedule` still hands out."""

    RUNNING = "running"  # everything: not paused
    NO_NEW = "no_new"  # requests that have begun go on, preempted ones included
    NOTHING = "nothing"
