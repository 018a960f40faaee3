"""Fakes are loaded from their files: test folders are no packages, and a fake may also run as a script."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inferd.appliance.library.library import Library

FAKES = Path(__file__).parent.parent / "fakes"


def load_fake(name: str) -> ModuleType:
    module_name = f"inferd_fake_{name}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, FAKES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


@pytest.fixture
def make_server() -> Iterator[Callable[[], Any]]:
    """A factory of `MeanServer`s."""
    servers: list[Any] = []

    def make() -> Any:
        servers.append(load_fake("mean_server").MeanServer())
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def mean_server(make_server: Callable[[], Any]) -> Any:
    return make_server()


@pytest.fixture
def fake_index(make_server: Callable[[], Any]) -> Any:
    """A package index whose files lie on another origin."""
    mean = load_fake("mean_server")
    return load_fake("index_server").FakeIndex(make_server(), make_server(), mean.Reply, mean.file_reply)


@pytest.fixture
def make_wheel() -> Callable[..., bytes]:
    return load_fake("index_server").make_wheel  # type: ignore[no-any-return]


@pytest.fixture
def fake_hub(make_server: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub whose large files lie on another origin."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the suite sets it; this hub is on loopback
    mean = load_fake("mean_server")
    return load_fake("hub_server").FakeHub(make_server(), make_server(), mean.Reply, mean.file_reply)


@pytest.fixture
def make_reply() -> Callable[..., Any]:
    return load_fake("mean_server").Reply  # type: ignore[no-any-return]


@pytest.fixture
def library(inferd_home: Path) -> Iterator[Library]:
    with Library.open(inferd_home) as library:
        yield library


@pytest.fixture
def make_service() -> Callable[..., Any]:
    """A `PullService` over the fakes, with an importer that takes any file that begins with GGUF."""
    return load_fake("pull_child").make_service  # type: ignore[no-any-return]


@pytest.fixture
def pull_child() -> Path:
    """The script that pulls in a process of its own."""
    return FAKES / "pull_child.py"
