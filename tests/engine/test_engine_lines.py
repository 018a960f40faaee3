"""What an engine prints arrives in our own log as what it was."""

from __future__ import annotations

import logging

import pytest

from inferd.engine.core.lines import FORMAT, LogRelay, child_level

LINES = [
    "INFO inferd.engine.worker.worker: KV cache: 7 blocks",
    "ERROR inferd.engine.executor.worker_main[1]: it failed",
    "Traceback (most recent call last):",
    "KeyError: 'INFO inferd.x: not a record'",
    "DEBUG inferd.engine: fine again",
]


def test_lines_keep_their_level_and_logger(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "inferd")
    relay = LogRelay()
    for line in LINES:
        relay(line)
    assert [(record.levelname, record.name, record.getMessage()) for record in caplog.records] == [
        ("INFO", "inferd.engine.worker.worker", "KV cache: 7 blocks"),
        ("ERROR", "inferd.engine.executor.worker_main[1]", "it failed"),
        ("ERROR", "inferd.engine.executor.worker_main[1]", "Traceback (most recent call last):"),
        ("ERROR", "inferd.engine.executor.worker_main[1]", "KeyError: 'INFO inferd.x: not a record'"),
        ("DEBUG", "inferd.engine", "fine again"),
    ]


def test_lines_say_whose_engine_it_is_and_need_no_beginning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "inferd")
    LogRelay("smol")("a word of a library in C")
    assert caplog.messages == ["[smol] a word of a library in C"]


def test_what_an_engine_writes_is_what_is_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "inferd")
    record = logging.LogRecord("inferd.engine.core.step", logging.WARNING, "", 0, "%d steps", (3,), None)
    LogRelay()(logging.Formatter(FORMAT).format(record))
    assert caplog.record_tuples == [("inferd.engine.core.step", logging.WARNING, "3 steps")]


@pytest.mark.parametrize(("here", "there"), [("DEBUG", "DEBUG"), ("INFO", "INFO"), ("ERROR", "INFO")])
def test_an_engine_writes_as_much_as_is_logged_and_never_less_than_its_last_words_need(
    caplog: pytest.LogCaptureFixture, here: str, there: str
) -> None:
    caplog.set_level(here, "inferd.engine")
    assert child_level() == there
