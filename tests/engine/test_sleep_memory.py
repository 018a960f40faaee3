"""The default model's memory, as the system counts it, awake and asleep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUM_NIGHTS = 20
# What 20 nights may leave in a process of 300 MB; a leak of one layer's weights a night would be three times as much.
GROWTH_BYTES = 24 << 20


@pytest.fixture(scope="module")
def figures(bundled_model: Path) -> dict[str, Any]:
    options = json.dumps({"kv_cache_bytes": 128 << 20, "num_threads": 1, "max_model_len": 2048})
    command = [sys.executable, "-P", "-m", "inferd.engine.testing.sleep_figures", str(bundled_model), options]
    done = subprocess.run([*command, str(NUM_NIGHTS)], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("level", [1, 2])
def test_almost_all_of_weights_and_kv_cache_goes_back(figures: dict[str, Any], level: int) -> None:
    given_back = figures[f"awake_before_{level}"] - figures[f"asleep_{level}"]
    assert figures["weights"] > 250 << 20
    assert figures["kv"] > 120 << 20
    assert given_back >= 0.9 * (figures["weights"] + figures["kv"])


def test_at_level_2_little_more_than_a_fresh_process_stays(figures: dict[str, Any]) -> None:
    assert figures["asleep_2"] - figures["fresh"] < 150 << 20


def test_sleeping_often_leaves_nothing_behind(figures: dict[str, Any]) -> None:
    nights = figures["nights"]
    assert len(nights) == NUM_NIGHTS
    assert figures["last_answer_is_the_first"]
    assert max(nights[-4:]) - max(nights[:4]) < GROWTH_BYTES


def test_a_wake_says_what_it_took(figures: dict[str, Any]) -> None:
    for level in (1, 2):
        report = figures[f"wake_{level}"]
        assert report["restored_bytes"] == {"weights": figures["weights"], "kv_cache": figures["kv"]}
        assert 0 < report["restored_s"]["weights"] <= report["seconds"]
