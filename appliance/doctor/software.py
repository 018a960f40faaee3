"""Python, torch, the compiler, and the kernels that an engine would run with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import msgspec

from inferd.appliance.doctor.finding import Finding, failure, fine, warning

PYTHONS = ((3, 11), (3, 13))
TORCHES = ((2, 11), (2, 13))
COMPILERS = ("cc", "gcc", "clang")
TWINS = "plain torch"  # in the sentences of the kernels' own choice
CHILD_TIMEOUT_S = 300.0  # the first time it compiles


class EngineAbout(msgspec.Struct, frozen=True, kw_only=True):
    """What `inferd.engine.about` prints."""

    torch: str = ""
    cuda: str | None = None
    num_gpus: int = 0
    kernels: tuple[str, ...] = ()
    kernels_error: str = ""


@dataclass(frozen=True)
class SoftwareFacts:
    python: tuple[int, int] = (3, 11)
    torch: str | None = None  # None: it is not installed
    compiler: str | None = None
    engine: EngineAbout | None = None
    engine_error: str = ""
    num_gpus: int = 0  # by the driver
    kernels_choice: str = "auto"
    device_choice: str = "auto"


def check_software(facts: SoftwareFacts) -> Iterator[Finding]:
    yield _python(facts)
    yield _torch(facts)
    if facts.compiler is None:
        remedy = (
            "Install one (Debian: `apt install gcc`): without it kernels for the processor are plain torch, and slower."
        )
        yield warning("compiler", f"none of {', '.join(COMPILERS)} is installed", remedy)
    else:
        yield fine("compiler", facts.compiler)
    yield _kernels(facts)
    if facts.num_gpus and facts.engine is not None and facts.device_choice != "cpu":
        yield _torch_gpus(facts.num_gpus, facts.engine)


def _python(facts: SoftwareFacts) -> Finding:
    shown = ".".join(map(str, facts.python))
    if not PYTHONS[0] <= facts.python <= PYTHONS[1]:
        return failure("python", f"{shown} is not supported", "Install inferd under Python 3.11, 3.12 or 3.13.")
    return fine("python", shown)


def _torch(facts: SoftwareFacts) -> Finding:
    remedy = "Install what inferd was tested with: `pip install -c constraints.txt torch`."
    if facts.torch is None:
        return failure("torch", "it is not installed", remedy)
    if not TORCHES[0] <= _two(facts.torch) <= TORCHES[1]:
        return failure("torch", f"{facts.torch} is not supported", remedy)
    return fine("torch", facts.torch)


def _kernels(facts: SoftwareFacts) -> Finding:
    engine = facts.engine
    if engine is None:
        remedy = (
            "Run `python -P -m inferd.engine.about`: it shows the whole error; often torch is to be installed anew."
        )
        return failure("kernels", f"an engine cannot start: {facts.engine_error}", remedy)
    if engine.kernels_error:
        return failure("kernels", engine.kernels_error, 'Set engine.kernels to "auto", or mend what is named.')
    text = "; ".join(engine.kernels)
    if facts.kernels_choice == "auto" and any(TWINS in decision for decision in engine.kernels):
        return warning("kernels", text, "Mend what is named there: own kernels are several times faster.")
    return fine("kernels", text)


def _torch_gpus(num_gpus: int, engine: EngineAbout) -> Finding:
    name, text = "gpus in torch", f"torch {engine.torch} sees {engine.num_gpus} of {num_gpus} cards"
    if engine.num_gpus >= num_gpus:
        return fine(name, text)
    if engine.cuda is None:
        remedy = "This torch is for the processor alone: `pip install --force-reinstall torch` brings one with CUDA."
    else:
        remedy = "See whether CUDA_VISIBLE_DEVICES hides them, and whether `nvidia-smi` lists them without an error."
    return failure(name, text, remedy)


def read_software(*, num_gpus: int, kernels: str, device: str) -> SoftwareFacts:
    engine, error = ask_engine(kernels)
    return SoftwareFacts(
        python=sys.version_info[:2],
        torch=_installed("torch"),
        compiler=next((path for name in COMPILERS if (path := shutil.which(name))), None),
        engine=engine,
        engine_error=error,
        num_gpus=num_gpus,
        kernels_choice=kernels,
        device_choice=device,
    )


def ask_engine(kernels: str) -> tuple[EngineAbout | None, str]:
    """In a process of its own, as an engine is: this one stays without torch."""
    command = [sys.executable, "-P", "-m", "inferd.engine.about", kernels]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    if done.returncode != 0:
        return None, lines[-1]
    try:
        return msgspec.json.decode(done.stdout, type=EngineAbout), ""
    except msgspec.DecodeError as error:
        return None, str(error)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _two(text: str) -> tuple[int, int]:
    major, minor = (int("".join(c for c in part if c.isdigit()) or 0) for part in text.split(".")[:2])
    return major, minor
