"""The units as systemd itself judges them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).parents[2] / "packaging" / "systemd"
ANALYZE = shutil.which("systemd-analyze")
pytestmark = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def analyze(tmp_path: Path, *words: str) -> str:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_COLORS": "0"}
    done = subprocess.run(
        ["systemd-analyze", *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("unit", "words", "highest"),
    [
        ("inferd.service", [], 2.0),
        ("inferd-user.service", ["--user"], 6.5),  # what a user's manager may refuse is left out
    ],
)
def test_exposure(tmp_path: Path, unit: str, words: list[str], highest: float) -> None:
    said = analyze(tmp_path, *words, "security", "--offline=true", str(SYSTEMD / unit))
    level = re.search(r"Overall exposure level for \S+ ([\d.]+)", said)
    assert level is not None, said
    assert float(level[1]) <= highest


@pytest.mark.parametrize(("unit", "words"), [("inferd.service", []), ("inferd-user.service", ["--user"])])
def test_nothing_in_it_is_unknown_to_systemd(tmp_path: Path, unit: str, words: list[str]) -> None:
    said = analyze(tmp_path, *words, "verify", str(SYSTEMD / unit))
    lines = [line for line in said.splitlines() if unit in line and "is not executable" not in line]
    assert not lines


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_the_user_is_made_with_its_groups(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    text = (SYSTEMD / "inferd.sysusers").read_text()
    subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", "-"], input=text, text=True, check=True, capture_output=True
    )
    groups = dict(line.split(":")[::3] for line in (tmp_path / "etc/group").read_text().splitlines())
    assert groups["video"] == groups["render"] == "inferd"
    assert ":/var/lib/inferd:" in (tmp_path / "etc/passwd").read_text()
