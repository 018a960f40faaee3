"""The tests of the Triton kernels and their backend, in Triton's interpreter: no card needed, the same assertions."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parents[1] / "gpu"
SOME = "not 256 and not 70- and not 4096"  # the interpreter takes seconds for each of these

# NumPy no longer turns arrays of one element into numbers, on which Triton 3.6's interpreter relies for loop bounds.
RUN = """
import sys
import pytest
from triton.runtime import interpreter
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
interpreter._patch_lang_tensor = patched
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", ["test_gpu_kernels.py", "test_gpu_attention.py"])
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_the_interpreter(name: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-P", "-c", RUN, "-m", "gpu", "-k", SOME, "-x", "-W", "ignore::RuntimeWarning"]
    done = subprocess.run([*command, str(GPU_TESTS / name)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
