"""A logits processor that breaks the engine it runs in, when a request asks for it.

`extra_args` of such a request: `fault` is one of `FAULTS`, `rank` says whose, `steps` how many steps go well before.
"preprocessing" is met where the request comes in. To be found, its entry point must be on the path of the engine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from inferd.engine.params import SamplingParams
from inferd.engine.sampling.plugins import GROUP
from inferd.engine.sampling.processors import AddedRow, ProcessorContext, RowProcessor, StepRows
from inferd.engine.worker.forward import EagerForward, StepLogits
from inferd.engine.worker.inputs import StepLayout


def _raise() -> None:
    raise ArithmeticError("planted in the forward pass")


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


class Fault:
    """What a process has been told to do to itself."""

    def __init__(self) -> None:
        self._act: Callable[[], None] | None = None
        self._steps_left = 0

    def plant(self, kind: str, steps: int) -> None:
        self._act, self._steps_left = FAULTS[kind], steps

    def meet(self) -> None:
        """In the middle of a step, where other ranks wait for this one."""
        if self._act is None:
            return
        if self._steps_left == 0:
            self._act()
        self._steps_left -= 1


FAULT = Fault()
_run = EagerForward.run


def _run_or_fail(self: EagerForward, step: StepLayout) -> StepLogits | None:
    FAULT.meet()
    return _run(self, step)


EagerForward.run = _run_or_fail  # type: ignore[method-assign]


class FaultProcessor(RowProcessor[None]):
    """Changes no logits."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__()

    def is_argmax_invariant(self) -> bool:
        return True

    def make_state(self, added: AddedRow) -> None:
        asked = added.params.extra_args or {}
        own_rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if asked.get("fault") in FAULTS and asked["rank"] == own_rank:
            FAULT.plant(asked["fault"], asked["steps"])

    def apply(self, logits: Tensor, step: StepRows) -> Tensor:
        return logits

    @staticmethod
    def validate_params(params: SamplingParams) -> None:
        if (params.extra_args or {}).get("fault") == "preprocessing":
            raise LookupError("planted where requests come in")


def install(site: Path) -> None:
    """Make `site` a folder from which, once it is on the path, engines load the processor."""
    info = site / "inferd_faults-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: inferd-faults\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nfaults = {__name__}:{FaultProcessor.__name__}\n", "utf-8")
