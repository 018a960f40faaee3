"""Log lines reach the event hub, from every thread, one line each, and never more than are kept."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from inferd.appliance.events.hub import JOURNAL_LENGTHS, EventHub
from inferd.appliance.log_ring import LogRing, lines_of, log_lines_to
from inferd.appliance.schemas import LogLine

log = logging.getLogger("inferd.appliance.test")


@pytest.fixture(autouse=True)
def _everything_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("inferd"), "level", logging.INFO)
    logging.getLogger("inferd").manager._clear_cache()  # type: ignore[attr-defined]


async def test_lines_of_the_daemon_and_of_engines(caplog: pytest.LogCaptureFixture) -> None:
    hub = EventHub()
    with log_lines_to(hub):
        log.warning("a client sent %s", "x\n2026 INFO forged\x1b[2J")
        threading.Thread(target=lines_of("smol"), args=("WARNING inferd.engine.core.step: 3 blocks left",)).start()
        await asyncio.sleep(0.05)
    log.warning("nobody listens any more")
    await asyncio.sleep(0)
    lines = [(line["level"], line["source"], line["text"]) for line in hub.records("logs")]
    assert lines == [
        ("warning", "daemon", "inferd.appliance.test: a client sent x\\x0a2026 INFO forged\\x1b[2J"),
        ("warning", "smol", "inferd.engine.core.step: 3 blocks left"),
    ]


async def test_a_traceback_is_one_line_each() -> None:
    hub = EventHub()
    with log_lines_to(hub):
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("it failed")
        await asyncio.sleep(0.05)
    texts = [line["text"] for line in hub.records("logs")]
    assert texts[0] == "inferd.appliance.test: it failed"
    assert texts[-1].strip() == "ValueError: why"
    assert not any("\n" in text for text in texts)


async def test_a_flood_costs_one_turn_and_keeps_the_newest() -> None:
    taken: list[LogLine] = []
    ring = LogRing(taken.append, asyncio.get_running_loop())
    kept = JOURNAL_LENGTHS["logs"]
    flood = threading.Thread(
        target=lambda: [ring.handle(logging.LogRecord("n", 20, "", 0, str(i), (), None)) for i in range(3 * kept)]
    )
    flood.start()
    flood.join()  # on the loop's own thread: it cannot turn meanwhile
    assert not taken
    await asyncio.sleep(0.01)
    assert len(taken) == kept
    assert taken[-1].text == f"n: {3 * kept - 1}"
