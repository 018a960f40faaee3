"""An engine that works is heard of, one that is stuck is not."""

from __future__ import annotations

import threading

import pytest

from inferd.engine.core.heartbeat import Heartbeat


def test_it_beats_while_the_engine_works_and_waits() -> None:
    beats = threading.Semaphore(0)
    heartbeat = Heartbeat(beats.release, 0.001)
    heartbeat.start()
    assert beats.acquire(timeout=30)  # idle
    with heartbeat.busy("a step", 60.0):
        assert all(beats.acquire(timeout=30) for _ in range(3))
        assert not heartbeat.is_stuck()


def test_what_takes_longer_than_it_may_is_told_once_and_ends_the_beats(caplog: pytest.LogCaptureFixture) -> None:
    heartbeat = Heartbeat(lambda: None, 60.0)
    for _ in range(2):
        with heartbeat.busy("a step", 0.0):
            assert heartbeat.is_stuck()
            assert heartbeat.is_stuck()
        assert not heartbeat.is_stuck()
    assert [record.getMessage() for record in caplog.records] == [
        "a step takes longer than 0 s: this engine hangs and falls silent"
    ] * 2
