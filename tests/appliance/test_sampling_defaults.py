"""What a request leaves open is sampled as the model's authors recommend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferd.appliance.api.openai.generation import sampling_params
from inferd.appliance.api.openai.schemas import CompletionRequest
from inferd.appliance.supervisor.served import read_sampling_defaults


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"temperature": None}, {}),
    ],
)
def test_generation_config(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert read_sampling_defaults(tmp_path) == expected


def test_the_request_wins() -> None:
    ask = CompletionRequest(model="m", prompt="x", temperature=0.0)
    params = sampling_params(ask, 5, {"temperature": 0.2, "top_p": 0.9})
    assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.9, 5)
