"""The parent's side of an import: starts the confined child and turns its report into an error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferd.engine.errors import LoadError
from inferd.engine.importer import sandbox

IMPORT_TIMEOUT_S = 120.0
_MAX_MESSAGE_CHARS = 2000
_QUANTISATION = re.compile(r"[A-Z0-9_]{1,24}")


def import_gguf(source: Path, folder: Path, timeout_s: float = IMPORT_TIMEOUT_S) -> str | None:
    """Writes config.json, tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF file. Returns how
    its weights are quantised ("Q4_K_M"), None where it does not say.

    Blocks; safe in any thread. `folder` must exist; config.json comes last, so a folder that has one is complete.
    Raises LoadError with the child's message.
    """
    arguments = [str(source.absolute()), str(folder.absolute())]
    found = run_child("inferd.engine.importer", arguments, source.name, timeout_s).get("quantisation")
    return found if isinstance(found, str) and _QUANTISATION.fullmatch(found) else None


def run_child(module: str, arguments: Sequence[str], subject: str, timeout_s: float) -> dict[str, Any]:
    """Runs `module` as a child with nothing of our environment, and waits for its one line of JSON, which it returns.

    `subject` is what an error speaks of. Raises LoadError.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, env=_environment(), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"{subject}: took longer than {timeout_s:g} s and was stopped") from error
    report = _report(child, subject)
    if (message := report.get("error")) is not None:
        raise LoadError(str(message)[:_MAX_MESSAGE_CHARS])
    return report


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


def _report(child: subprocess.CompletedProcess[bytes], subject: str) -> dict[str, Any]:
    try:
        report = json.loads(child.stdout)
    except ValueError:
        report = None
    if not isinstance(report, dict):  # it died before its report
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        cause = lines[-1] if lines else "it said nothing"
        ended = f"by signal {-child.returncode}" if child.returncode < 0 else f"with status {child.returncode}"
        return {"error": f"{subject}: the import process ended {ended}: {cause}"}
    return report
