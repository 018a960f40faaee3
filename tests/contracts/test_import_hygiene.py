"""The daemon stays small: what it imports is looked at in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "triton"}


def loaded_modules(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import inferd.engine",
        "from inferd.engine import AsyncLLM, LLM, EngineArgs, SamplingParams",
        "import inferd.engine.core.step, inferd.engine.core.proc, inferd.engine.core.client",
        "import inferd.appliance.main, inferd.appliance.app",
        "import inferd.appliance.cli",
    ],
)
def test_no_torch(statement: str) -> None:
    assert not loaded_modules(statement) & HEAVY
