"""What a person sees at a terminal: one bar of what goes on now, and log lines that it does not run into."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading

SCRIPT = """
import logging
from inferd.appliance.downloads.progress import PullProgress
from inferd.appliance.downloads.show import display_on_stderr
from inferd.appliance.log import set_up_logging

display = display_on_stderr()
set_up_logging("info", display.write)
log = logging.getLogger("inferd.test")
log.info("before any bar")
for phase, total in (("resolving", None), ("downloading", 1 << 21), ("verifying", 1 << 21), ("importing", None)):
    display(PullProgress(phase, "model.gguf", 1 << 20 if total else 0, total))
    log.info("a line during %s %s", phase, "[not markup] " * 20)
display.stage("starting the engine of tiny")
log.info("a line during the start")
display.close()
display.stage("too late")
log.info("after the bar")
"""
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(script: str) -> str:
    screen, terminal = pty.openpty()
    shown = bytearray()

    def drain() -> None:
        while True:
            try:
                data = os.read(screen, 4096)
            except OSError:  # the other end is closed
                return
            shown.extend(data)

    reader = threading.Thread(target=drain)
    reader.start()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    environ.pop("NO_COLOR", None)
    subprocess.run([sys.executable, "-P", "-c", script], stderr=terminal, env=environ, check=True, timeout=60)
    os.close(terminal)
    reader.join()
    os.close(screen)
    return shown.decode()


def test_phases_follow_each_other_on_one_bar_and_lines_stay_whole() -> None:
    shown = on_a_terminal(SCRIPT)
    text = ANSI.sub("", shown).replace("\r", "\n")
    phases = ["resolving model.gguf", "downloading model.gguf", "verifying model.gguf", "importing model.gguf"]
    phases.append("starting the engine of tiny")
    places = [text.index(f"\n{phase}  ") for phase in phases]
    assert places == sorted(places)
    assert "too late" not in text
    lines = text.split("\n")
    records = [line for line in lines if "inferd.test: " in line]
    assert len(records) == 7
    assert all(re.match(r"\d{4}-\d\d-\d\d [\d:,]+ INFO    inferd\.test: ", line) for line in records)
    assert not any("━" in line for line in records)
    assert "".join(lines).count("[not markup]") == 4 * 20  # folded at the edge, nothing of it lost
    assert re.search(r"downloading [^\n]*/2\.0 MiB", text)
    assert not re.search(r"(resolving|importing|starting)[^\n]*(MiB|bytes)", text)  # what has no bytes counts none


def test_the_bar_is_gone_in_the_end() -> None:
    rest = on_a_terminal(SCRIPT).rpartition("\x1b[2K")[2].rstrip()
    assert "━" not in rest
    assert rest.endswith("inferd.test: after the bar")
