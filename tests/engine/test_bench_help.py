"""`inferd bench --help` says what every option is for."""

from __future__ import annotations

import re

import pytest

from inferd.engine.bench.command import main


def test_every_option_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    entries = re.split(r"\n  (?=-)", text)[1:]  # each begins with its option, and goes on in deeper lines
    assert len(entries) > 10
    bare = [entry for entry in entries if not re.search(r"\s{2,}\S", entry.partition("\n\n")[0])]
    assert not bare
