"""The parent's side of an import: starts the confined child and turns its report into an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from inferd.engine.errors import LoadError
from inferd.engine.importer import sandbox

IMPORT_TIMEOUT_S = 120.0
_MAX_MESSAGE_CHARS = 2000


def import_gguf(source: Path, folder: Path, timeout_s: float = IMPORT_TIMEOUT_S) -> None:
    """Writes config.json, tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF file.

    Blocks; safe in any thread. `folder` must exist; config.json comes last, so a folder that has one is complete.
    Raises LoadError with the child's message.
    """
    run_child("inferd.engine.importer", [str(source.absolute()), str(folder.absolute())], source.name, timeout_s)


def run_child(module: str, arguments: Sequence[str], subject: str, timeout_s: float) -> None:
    """Runs `module` as a child with nothing of our environment, and waits for its one line of JSON.

    `subject` is what an error speaks of. Raises LoadError.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, env=_environment(), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"{subject}: took longer than {timeout_s:g} s and was stopped") from error
    message = _reported_error(child, subject)
    if message is not None:
        raise LoadError(message[:_MAX_MESSAGE_CHARS])


def _environment() -> dict[str, str]:
    """No secrets; and no threads, whose stacks and arenas would count against the limit on address space."""
    return {
        sandbox.PARENT_VARIABLE: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if os.path.isabs(path)),
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }


def _reported_error(child: subprocess.CompletedProcess[bytes], subject: str) -> str | None:
    try:
        report = json.loads(child.stdout)
        message = report.get("error")
    except (ValueError, AttributeError):  # it died before its report
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        cause = lines[-1] if lines else "it said nothing"
        ended = f"by signal {-child.returncode}" if child.returncode < 0 else f"with status {child.returncode}"
        return f"{subject}: the import process ended {ended}: {cause}"
    return None if message is None else str(message)
