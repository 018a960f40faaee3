"""The tests of the Triton kernels and their backend, in Triton's interpreter: no card needed, the same assertions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SOME = "not 256 and not 70- and not 4096"  # the interpreter takes seconds for each of these


@pytest.mark.parametrize("name", ["test_gpu_kernels.py", "test_gpu_attention.py"])
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_the_interpreter(interpret: Callable[..., None], name: str) -> None:
    interpret(name, "-k", SOME)
