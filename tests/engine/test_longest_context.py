"""How long contexts get: given, left to memory, or refused before anything large is allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.build import build_engine
from inferd.engine.config import EngineArgs
from inferd.engine.core.step import EngineCore
from inferd.engine.errors import ConfigError, ContextLengthExceeded
from inferd.engine.executor.uniproc import UniProcExecutor
from inferd.engine.messages import AddRequest
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.testing.jobs import Job, run_jobs
from inferd.engine.testing.model_folder import make_model_folder
from inferd.engine.worker import memory
from inferd.engine.worker.worker import Worker

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # of the tiny model: layers, keys and values, tokens, heads, head size, float32
HUGE = 2_000_000_000  # positions, whose rope table alone would take 128 GB


def make_args(folder: Path, **changes: Any) -> EngineArgs:
    options: dict[str, Any] = dict(device="cpu", dtype="float32", kernels="torch", load_format="dummy", num_threads=1)
    return EngineArgs(str(folder), **(options | dict(block_size=16, max_num_seqs=2) | changes))


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model", config={"max_position_embeddings": HUGE})


def test_too_much_is_refused_before_it_is_allocated(endless: Path) -> None:
    with pytest.raises(ConfigError, match=rf"max_model_len={HUGE} .*lower max_model_len to at most 304\."):
        build_engine(make_args(endless, kv_cache_bytes=20 * BLOCK_BYTES))


def test_auto_takes_what_fits(endless: Path) -> None:
    core, ready = build_engine(make_args(endless, max_model_len="auto", kv_cache_bytes=20 * BLOCK_BYTES))
    assert (ready.max_model_len, ready.num_blocks, core.max_model_len) == (304, 20, 304)
    assert "max_model_len=304: the longest that fits into the KV cache" in ready.decisions
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    assert len(run_jobs(core, [Job("a", (5,) * 300, params)]).tokens["a"]) == 4
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 304 tokens"):
        core.add(AddRequest("b", [5] * 304, params, 0.0))


def test_auto_goes_no_further_than_the_model(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", config={"max_position_embeddings": 100})
    _, ready = build_engine(make_args(folder, max_model_len="auto", num_blocks=50))
    assert ready.max_model_len == 100


def test_auto_stays_within_the_memory_that_is_usually_taken(endless: Path) -> None:
    """On a machine of 64 GiB keys and values take 4, however long the model's context is."""
    config = resolve(make_args(endless, max_model_len="auto"))
    worker = Worker(config, probe=lambda: memory.MemoryReading(64 << 30, 64 << 30))
    worker.load()
    assert worker.available_kv_bytes() == memory.CPU_KV_CACHE_BYTES
    poor = Worker(config, probe=lambda: memory.MemoryReading(1 << 30, 64 << 30))
    poor.load()
    left = 0.9 * (1 << 30) - memory.largest_step_bytes(config)
    kept_for_positions = left - poor.available_kv_bytes()
    position_bytes, token_bytes = 16 * 4, BLOCK_BYTES // 16
    assert kept_for_positions == pytest.approx(left * position_bytes / (position_bytes + token_bytes), rel=1e-3)


def test_positions_are_reserved_for_the_context_that_was_settled(endless: Path) -> None:
    config = resolve(make_args(endless, max_model_len="auto", kv_cache_bytes=400 * BLOCK_BYTES))
    executor = UniProcExecutor(config)
    core = EngineCore(config, executor)
    assert core.max_model_len == 6384
    model = executor.worker._loaded()[0]
    assert [len(table.cos_sin) for table in model.model.rope_tables] == [6384]  # type: ignore[attr-defined]


def test_reset_waits_for_running_requests(tmp_path: Path) -> None:
    core, _ = build_engine(make_args(make_model_folder(tmp_path / "model"), num_blocks=200))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompt = list(range(3, 40))

    def cached_tokens(name: str) -> int:
        core.add(AddRequest(name, prompt, params, 0.0))
        outputs = core.step().outputs
        assert not core.reset_prefix_cache()
        while core.has_work:
            core.step()
        return outputs[0].num_cached_tokens

    assert [cached_tokens("a"), cached_tokens("b")] == [0, 32]
    assert core.reset_prefix_cache()
    assert cached_tokens("c") == 0


def test_kv_events_come_with_the_outputs(tmp_path: Path) -> None:
    args = make_args(make_model_folder(tmp_path / "model"), num_blocks=200)
    prompt, params = list(range(3, 40)), SamplingParams(temperature=0.0, max_tokens=1)
    for enabled, expected in ((False, 0), (True, 1)):
        core, _ = build_engine(replace(args, enable_kv_events=enabled))
        core.add(AddRequest("a", prompt, params, 0.0))
        events = core.step().kv_events
        assert len(events) == expected
    assert events[0].token_ids == prompt[:32]  # type: ignore[union-attr]
