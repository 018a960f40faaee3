"""What a service manager hears."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.appliance.sdnotify import Notifier


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("notify")
        listener.settimeout(5)
        yield listener


def heard(manager: socket.socket) -> list[str]:
    return manager.recv(4096).decode().split("\n")


def test_each_word_arrives(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": "notify"})
    notifier.ready("serving\nm")
    assert heard(manager) == ["READY=1", "STATUS=serving m"]
    notifier.reloading()
    assert heard(manager)[0] == "RELOADING=1"
    notifier.stopping("draining", 40)
    assert heard(manager) == ["STOPPING=1", "STATUS=draining", "EXTEND_TIMEOUT_USEC=40000000"]


def test_an_abstract_socket_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0inferd-notify-test")
        listener.settimeout(5)
        Notifier({"NOTIFY_SOCKET": "@inferd-notify-test"}).status("x")
        assert heard(listener) == ["STATUS=x"]


async def test_the_watchdog_speaks_twice_a_period_and_stops_with_the_loop(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": "notify", "WATCHDOG_USEC": "40000"})
    task = asyncio.create_task(notifier.watchdog())
    await asyncio.sleep(0.1)
    task.cancel()
    count = 0
    manager.setblocking(False)
    try:
        while heard(manager) == ["WATCHDOG=1"]:
            count += 1
    except BlockingIOError:
        pass
    assert 2 <= count <= 6


def drain(manager: socket.socket) -> None:
    try:
        while heard(manager):
            pass
    except BlockingIOError:
        return


async def test_a_loop_that_stands_still_says_nothing(manager: socket.socket) -> None:
    task = asyncio.create_task(Notifier({"NOTIFY_SOCKET": "notify", "WATCHDOG_USEC": "20000"}).watchdog())
    await asyncio.sleep(0.03)
    manager.setblocking(False)
    drain(manager)
    time.sleep(0.1)  # noqa: ASYNC251 - the loop hangs, other threads do not
    with pytest.raises(BlockingIOError):
        heard(manager)
    await asyncio.sleep(0.03)
    assert heard(manager) == ["WATCHDOG=1"]
    task.cancel()


def test_after_a_reload_the_status_of_before_comes_back(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": "notify"})
    notifier.status("serving m")
    notifier.reloaded("port needs a restart")
    notifier.reloaded()
    assert [heard(manager) for _ in range(3)][1:] == [
        ["READY=1", "STATUS=serving m; port needs a restart"],
        ["READY=1", "STATUS=serving m"],
    ]


async def test_without_a_manager_nothing_is_sent() -> None:
    notifier = Notifier({})
    notifier.ready("x")
    await notifier.watchdog()


def test_a_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("x")
