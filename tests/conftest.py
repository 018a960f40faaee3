"""No network, no user's own state: every test starts from an empty home and may only reach loopback."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd.appliance.library.library import Library

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class NetworkForbidden(Exception):
    """A test tried to leave this machine."""


def _is_local(address: Any) -> bool:
    if not isinstance(address, tuple):
        return True  # a unix socket's path
    return address[0] in ("localhost", "") or str(address[0]).startswith("127.") or address[0] == "::1"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    real_connect = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if not _is_local(address):
            raise NetworkForbidden(f"a test tried to connect to {address!r}")
        real_connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture(autouse=True)
def inferd_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh INFERD_HOME and run directory; the real ones stay invisible."""
    for name in [name for name in os.environ if name.startswith("INFERD_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    run = Path("/tmp") / f"inferd-test-{os.getpid()}-{abs(hash(str(tmp_path))) % 10**8}"  # unix paths are ≤ 107 bytes
    monkeypatch.setenv("INFERD_HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield home
    shutil.rmtree(run, ignore_errors=True)


TEST_HOME = os.environ.get("INFERD_TEST_HOME")


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The folder of the default model, which `make test` pulls beforehand."""
    if TEST_HOME is None:
        pytest.skip("INFERD_TEST_HOME is not set: run through `make test`, which pulls the default model")
    with Library.open(Path(TEST_HOME)) as library:
        return library.folder(library.find("smollm2-135m-instruct"))
