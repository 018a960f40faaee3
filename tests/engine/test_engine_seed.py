"""Requests without a seed: repeated where the engine was given one, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferd.engine.frontend.llm import LLM
from inferd.engine.params import SamplingParams
from inferd.engine.testing.model_folder import make_model_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


def answers(folder: Path, params: SamplingParams, **options: Any) -> list[list[int]]:
    with LLM(folder, in_process=True, device="cpu", load_format="dummy", dtype="float32", **options) as llm:
        outputs = llm.generate(["one", "two"], params, progress=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_two_starts_differ_in_what_is_drawn_and_in_nothing_else(folder: Path) -> None:
    assert answers(folder, GREEDY) == answers(folder, GREEDY)
    assert answers(folder, SAMPLED) != answers(folder, SAMPLED)


def test_a_configured_seed_repeats_what_is_drawn(folder: Path) -> None:
    assert answers(folder, SAMPLED, seed=5) == answers(folder, SAMPLED, seed=5)
    one, two = answers(folder, SAMPLED, seed=5)
    assert one != two  # requests draw for themselves
