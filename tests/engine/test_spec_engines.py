"""Speculation through whole engines: other executors, ranks, sleep, and what is told of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from inferd.engine import LLM, SamplingParams, SpeculativeArgs
from inferd.engine.build import build_engine
from inferd.engine.config import EngineArgs
from inferd.engine.messages import SchedulerStats
from inferd.engine.testing.jobs import Job, Run, run_jobs
from inferd.engine.testing.random_checkpoint import make_random_checkpoint

TEXT = (40, 41, 42, 43, 44, 45, 46, 47)
JOBS = [
    Job("greedy", TEXT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)),
    Job("repeats", TEXT * 2, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)),
    Job("seeded", TEXT, SamplingParams(temperature=0.9, seed=4, max_tokens=20, ignore_eos=True), joins_at_step=3),
    Job("penalised", TEXT, SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=20), joins_at_step=5),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("spec") / "model")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer, and fewer positions."""
    folder = tmp_path_factory.mktemp("spec") / "small"
    return make_random_checkpoint(folder, seed=5, num_hidden_layers=1, max_position_embeddings=32)


def run(folder: Path, speculative: SpeculativeArgs | None, **options: Any) -> tuple[Run, list[str]]:
    fixed: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_blocks=40, block_size=8)
    limits: dict[str, Any] = dict(max_num_batched_tokens=48, max_num_seqs=6, max_model_len=64)
    args = EngineArgs(str(folder), speculative=speculative, **(fixed | limits | options))
    core, ready = build_engine(args)
    try:
        return run_jobs(core, JOBS), ready.decisions
    finally:
        core.shutdown()


def drafters(folder: Path, small: Path) -> dict[str, SpeculativeArgs]:
    return {
        "ngram": SpeculativeArgs("ngram", prompt_lookup_min=1),
        "itself": SpeculativeArgs("draft", model=str(folder)),
        "small": SpeculativeArgs("draft", model=str(small)),
    }


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("ngram", dict(executor="multiproc", async_scheduling=True)),
        ("itself", dict(tensor_parallel_size=2)),
        ("small", dict()),
    ],
)
def test_tokens_are_those_without_drafts(folder: Path, small: Path, drafter: str, options: dict[str, Any]) -> None:
    plain, _ = run(folder, None)
    guessed, decisions = run(folder, drafters(folder, small)[drafter], **options)
    assert guessed.tokens == plain.tokens
    assert guessed.reasons == plain.reasons
    assert guessed.stats.drafted
    assert any(sentence.startswith("speculative: up to 5 tokens are drafted ") for sentence in decisions)
    assert any(sentence.startswith("draft model: ") for sentence in decisions) == (drafter != "ngram")
    if drafter == "itself":
        assert guessed.stats.step < plain.stats.step


def test_an_offline_batch(folder: Path) -> None:
    """Through the front: choices, stop strings, and what the engine counts."""
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=24, stop=["a"], ignore_eos=True)
    options: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_blocks=60, max_model_len=64)

    def texts(speculative: SpeculativeArgs | None) -> tuple[list[str], SchedulerStats]:
        with LLM(folder, in_process=True, speculative=speculative, **options) as llm:
            (output,) = llm.generate("abcabcabc", params, progress=False)
            stats = SchedulerStats(**llm._engine.call("stats"))
            return [choice.text for choice in output.outputs], stats

    plain, nothing = texts(None)
    guessed, stats = texts(SpeculativeArgs("draft", model=str(folder)))
    assert guessed == plain
    assert nothing.drafted == nothing.accepted == []
    assert 0 < stats.accepted[0] <= stats.drafted[0]


def test_a_draft_model_sleeps_and_wakes_with_the_engine(folder: Path, small: Path) -> None:
    options: dict[str, Any] = dict(device="cpu", dtype="float32", kernels="torch", num_blocks=40, max_model_len=64)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    run_dir = Path(os.environ["XDG_RUNTIME_DIR"])

    def answer(llm: LLM) -> list[int]:
        return llm.generate("a prompt", greedy, progress=False)[0].outputs[0].token_ids

    with LLM(folder, run_dir=run_dir, **options) as llm:
        expected, (alone,) = answer(llm), llm.memory()
    wanted = SpeculativeArgs("draft", model=str(folder))
    with LLM(folder, run_dir=run_dir, speculative=wanted, **options) as llm:
        assert answer(llm) == expected
        (both,) = llm.memory()
        assert (both.weights, both.kv) == (2 * alone.weights, 2 * alone.kv)
        for level in (1, 2):
            assert llm.sleep(level).released_bytes == {"weights": both.weights, "kv_cache": both.kv}
            llm.wake()
            assert answer(llm) == expected
        stats = SchedulerStats(**llm._engine.call("stats"))
        assert stats.accepted == stats.drafted
        assert sum(stats.drafted) > 20


def test_memory_is_shared_with_the_draft_model(folder: Path, small: Path) -> None:
    """`kv_cache_bytes` holds for both."""
    options: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", max_model_len=64)
    blocks = []
    for speculative in (None, SpeculativeArgs("draft", model=str(folder)), SpeculativeArgs("ngram")):
        core, ready = build_engine(EngineArgs(str(folder), kv_cache_bytes=1 << 20, speculative=speculative, **options))
        core.shutdown()
        blocks.append(ready.num_blocks)
    assert blocks[1] == blocks[0] // 2
    assert blocks[2] == blocks[0]
