"""What an import child does to itself before it touches a file of unknown origin, and how it reports. Linux only."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping

from inferd.engine.errors import LoadError

MEMORY_BYTES = 4 << 30
CPU_S = 300
FILE_BYTES = 1 << 40
OPEN_FILES = 64

PARENT_VARIABLE = "INFERD_PARENT_PID"
EXIT_PARENT_DIED = 3

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def confine(cpu_s: int = CPU_S) -> None:
    """Bounds memory, processor time, files and privileges of this process, and ties its life to its parent's.

    The parent must wait in the thread that started this process: the kernel watches that thread, not the process.
    """
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(PARENT_VARIABLE, str(os.getppid())) != str(os.getppid()):  # it died while this one started
        os._exit(EXIT_PARENT_DIED)
    _control(_PR_SET_NO_NEW_PRIVS, 1)


def report(work: Callable[[], Mapping[str, str | None] | None]) -> int:
    """Does `work` and prints one JSON line: what it found out, or `{"error": text}` for a LoadError. Returns the exit
    status.

    Anything else that is raised is a fault of ours and leaves as a traceback.
    """
    try:
        found = work() or {}
    except LoadError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    except MemoryError:
        print(json.dumps({"error": f"needs more than the {MEMORY_BYTES >> 30} GB of memory that an import may use"}))
        return 1
    except OSError as error:
        print(json.dumps({"error": f"{error.filename or 'file'}: {os.strerror(error.errno or 0)}"}))
        return 1
    print(json.dumps(found))
    return 0


def _control(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        sys.exit(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
