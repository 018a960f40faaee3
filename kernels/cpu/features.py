"""What this machine's processor can do, and which OpenMP runtime torch brought."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

import torch

REQUIRED_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")

_OPENMP = re.compile(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*)$")


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction set flags as Linux names them; empty where it does not tell."""
    return frozenset(_cpuinfo("flags").split())


@cache
def cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def missing_features() -> str | None:
    """None when the native kernels can run here, else the reason against."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"they are written for x86-64 Linux, this is {platform.machine()} {platform.system()}"
    missing = [flag for flag in REQUIRED_FLAGS if flag not in cpu_flags()]
    return f"the processor lacks {', '.join(missing)}" if missing else None


def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes that are loaded into this process."""
    matches = (_OPENMP.search(line) for line in Path("/proc/self/maps").read_text().splitlines())
    return sorted({match.group(1) for match in matches if match})


def torch_openmp() -> str | None:
    """The runtime that torch computes with: kernels bound to another one would fight it for the cores."""
    loaded = openmp_runtimes()
    home = str(Path(torch.__file__).parent.parent)
    ours = [path for path in loaded if path.startswith(home)]
    candidates = ours or loaded
    return candidates[0] if len(candidates) == 1 else None


def _cpuinfo(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    match = re.search(rf"^{re.escape(field)}\s*:\s*(.*)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""
