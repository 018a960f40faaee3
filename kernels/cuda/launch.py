"""Launches of Triton kernels at a third of the host's time that Triton's own takes.

Triton looks a call's compiled kernel up by what it specialises on: dtypes, and whether addresses and whole numbers
are multiples of 16, or 1. `Launcher` does the same with a plain dictionary, and hands the arguments straight to the
compiled kernel. What it calls for that is no public interface, so it does so only on the releases of Triton that it was
tried on, and for tensors and numbers only; all else goes Triton's own way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from inferd.kernels.cuda.device import card

_TRIED = ("3.6.",)


class Launcher:
    """One kernel. Its constants come last, in the order in which the kernel declares them."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}
        self._direct = triton.__version__.startswith(_TRIED)

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        *,
        device: torch.device,
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        """`constants` lacks DEPENDENT, which every kernel declares last: whether it may start before its predecessor
        has finished, which is so on every card that can."""
        dependent = card(device).dependent_launch
        values = (*constants.values(), dependent)
        key = (device.index, num_warps, num_stages, values, _specialisation(arguments)) if self._direct else None
        compiled = self._compiled.get(key)
        if compiled is None:
            self._first(key, grid, arguments, {**constants, "DEPENDENT": dependent}, num_warps, num_stages)
            return
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        compiled.run(
            *(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *values)
        )

    def _first(
        self,
        key: Any,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        num_warps: int,
        num_stages: int,
    ) -> None:
        declared = self._kernel.arg_names[len(arguments) :]
        if list(constants) != declared:
            raise TypeError(f"{self._kernel} declares the constants {declared}, not {list(constants)}")
        compiled = self._kernel[grid](
            *arguments,
            *constants.values(),
            num_warps=num_warps,
            num_stages=num_stages,
            launch_pdl=constants["DEPENDENT"],
        )
        if compiled is not None and key is not None and key[-1] is not None:
            self._compiled[key] = compiled


def _specialisation(arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """What Triton compiles for; None where an argument is neither a tensor nor a number."""
    kinds: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            kinds += (argument.dtype, argument.data_ptr() & 15 == 0)
        elif isinstance(argument, int):
            kinds.append(1 if argument == 1 else (argument & 15 == 0, -(2**31) <= argument < 2**31))
        elif not isinstance(argument, float):
            return None
    return tuple(kinds)
