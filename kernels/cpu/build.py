"""Compiles the C kernels once with the local compiler and loads them, bound to torch's own OpenMP runtime."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from inferd.kernels.common.ops import KernelUnavailable
from inferd.kernels.cpu.features import cpu_flags, missing_features, openmp_runtimes, torch_openmp

SOURCE_DIR = Path(__file__).parent
COMPILE_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-std=gnu11")
COMPILER_NAMES = ("cc", "gcc", "clang")
_TIMEOUT_S = 120


def default_cache_dir() -> Path:
    """Where compiled kernels and measurements are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "inferd" / "kernels"


def load_library(cache_dir: Path) -> ctypes.CDLL:
    """The kernels, compiled into `cache_dir` unless they are there already.

    Any number of processes may do this at once: each compiles aside and renames. Raises KernelUnavailable with the
    reason when the processor lacks an instruction, or nothing can compile, write or load.
    """
    if reason := missing_features():
        raise KernelUnavailable(reason)
    openmp = torch_openmp()
    if openmp is None:
        raise KernelUnavailable(f"torch's OpenMP runtime is not clear among {openmp_runtimes()}")
    compiler = find_compiler()
    path = cache_dir / f"cpu-{_fingerprint(compiler, openmp)}.so"
    if not path.exists():
        _compile(compiler, openmp, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)  # the next start compiles it again
        raise KernelUnavailable(f"{path} does not load: {error}") from error


def find_compiler() -> str:
    """The path of a C compiler; raises KernelUnavailable without one."""
    for name in COMPILER_NAMES:
        if path := shutil.which(name):
            return path
    raise KernelUnavailable(f"no C compiler: none of {', '.join(COMPILER_NAMES)} is installed")


def _fingerprint(compiler: str, openmp: str) -> str:
    """Changes with anything that the compiled code depends on."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCE_DIR.glob("*.c"), *SOURCE_DIR.glob("*.h")]):
        digest.update(source.read_bytes())
    for part in (_run([compiler, "--version"]), " ".join(sorted(cpu_flags())), openmp, " ".join(COMPILE_FLAGS)):
        digest.update(part.encode())
    return digest.hexdigest()[:20]


def _compile(compiler: str, openmp: str, path: Path) -> None:
    """Every source in a process of its own, then one link without -fopenmp: that would add the compiler's runtime."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            objects = {str(source): str(Path(folder) / f"{source.stem}.o") for source in SOURCE_DIR.glob("*.c")}
            _run_all([[compiler, *COMPILE_FLAGS, "-c", source, "-o", target] for source, target in objects.items()])
            linked = Path(folder) / path.name
            _run([compiler, "-shared", *objects.values(), openmp, "-lm", "-o", str(linked)])
            os.replace(linked, path)
    except OSError as error:
        raise KernelUnavailable(f"cannot write compiled kernels to {path.parent}: {error}") from error


def _run(command: list[str]) -> str:
    return _run_all([command])[0]


def _run_all(commands: list[list[str]]) -> list[str]:
    """Runs them side by side; their outputs. Raises KernelUnavailable when one fails."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in running]
    except subprocess.TimeoutExpired as error:
        raise KernelUnavailable(f"{commands[0][0]} took longer than {_TIMEOUT_S} s") from error
    finally:
        for process in running:
            process.kill()
            process.wait()
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            raise KernelUnavailable(f"{command[0]} failed with status {process.returncode}: {output.strip()[-500:]}")
    return outputs
