"""The GPU suite's arithmetic and its whole way, on a model small enough for this machine's processor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.bench import command as bench
from inferd.engine.bench import gpu_profile
from inferd.engine.bench.gpu_profile import StepParts, profile_steps
from inferd.engine.bench.gpu_report import GpuReport
from inferd.engine.bench.gpu_suite import GPU_SUITE, GpuRow, make_dummy_model, select_rows
from inferd.engine.bench.gpu_timing import GpuResult, TimedEngine, measure_rows
from inferd.engine.bench.workloads import Workload
from inferd.engine.config import EngineArgs
from inferd.engine.model_config import read_model_config

TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def args(tmp_path: Path) -> EngineArgs:
    folder = make_dummy_model(tmp_path / "model", **TINY)
    options: dict[str, Any] = dict(load_format="dummy", device="cpu", dtype="float32", num_threads=1)
    return EngineArgs(str(folder), max_model_len=256, kv_cache_bytes=1 << 26, **options)


def row(counts: str = "output", shared: int = 0) -> GpuRow:
    workload = Workload("tiny", 3, shared, 20, 5, primed=shared > 0)
    return GpuRow(workload, peer=(90.0, 110.0), target=200.0, floor_s=0.5, counts=counts)


def test_the_dummy_model_has_the_shapes_that_it_is_named_for(tmp_path: Path) -> None:
    config = read_model_config(make_dummy_model(tmp_path))
    sizes = (config.hidden_size, config.intermediate_size, config.num_layers, config.vocab_size)
    assert sizes == (4096, 14336, 32, 128256)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (32, 8, 128)
    assert config.rope.scaling == "llama3"


def test_rows_are_chosen_by_name() -> None:
    assert [row.name for row in select_rows("b32,long1")] == ["b32", "long1"]
    assert select_rows(None) == list(GPU_SUITE)
    with pytest.raises(ValueError, match=r"no row 'b33' in the GPU suite; there are: b1, b8"):
        select_rows("b33")


def test_each_row_counts_what_it_says(args: EngineArgs) -> None:
    engine = TimedEngine(args, in_process=True)
    rows = [row(), row("prompt"), row("decode"), row("decode", shared=64)]
    try:
        for one in rows:
            seconds, speed = engine.time(one, 0)
            tokens = {"output": 15, "prompt": 60, "decode": 12}[one.counts]
            assert seconds * speed == pytest.approx(tokens)
        said: list[str] = []
        [result] = measure_rows(engine, [row()], 2, said.append)
    finally:
        engine.shutdown()
    assert result.tokens_per_s == max(result.rounds)
    assert len(result.rounds) == len(said) == 2
    assert engine.ready_s > 0


def test_parts_of_a_step_are_its_own(args: EngineArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_profile, "PROMPT_TOKENS", 12)
    monkeypatch.setattr(gpu_profile, "OUTPUT_TOKENS", 9)
    one, several = profile_steps(args, (1, 3))
    assert (one.num_rows, several.num_rows) == (1, 3)
    for parts in (one, several):
        assert parts.num_steps == 6  # the prompt's step is none of them, and the first quarter is left out
        assert len(parts.medians_ms) == len(StepParts.NAMES)
        assert min(parts.medians_ms) >= 0


def test_the_report_sets_figures_against_their_yardsticks() -> None:
    b1 = GPU_SUITE[0]
    result = GpuResult("b1", seconds=1.9, tokens_per_s=411.0, rounds=[400.0, 411.0])
    report = GpuReport("a card", {"dtype": "auto"}, 6.5, [result], [StepParts(1, 8, [0.1] * 5)], ["said"])
    text = report.as_text()
    assert f"| b1 | output | 411 | 1.90 | 203-208 | 2.00 | 228 | {411 / 228:.2f} | {b1.floor_s / 1.9:.2f} |" in text
    assert "ready after 6.5 s (peer 58-90, target 8)" in text
    assert "vLLM 0.25.1" in text
    assert "| 1 | 8 | 0.100 | 0.100 | 0.100 | 0.100 | 0.100 | 0.500 |" in text
    fields = json.loads(report.as_json())
    assert fields["results"][0]["peer"] == [203, 208]
    assert fields["results"][0]["rounds"] == [400.0, 411.0]
    assert "tok/s" not in replace(report, results=[], parts=[]).as_text()


def test_unknown_rows_end_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--suite", "gpu", "--rows", "b33"]) == 1
    assert "no row 'b33'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main([])
    assert "--model is required" in capsys.readouterr().err
