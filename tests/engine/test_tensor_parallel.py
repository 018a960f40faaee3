"""Layers divided over two ranks answer token by token as one rank does, in float32 with plain kernels."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.build import build_engine
from inferd.engine.config import EngineArgs
from inferd.engine.messages import EngineReady
from inferd.engine.params import SamplingParams
from inferd.engine.testing.jobs import Job, run_jobs
from inferd.engine.testing.random_checkpoint import ODD_VOCAB_SIZE, make_random_checkpoint

LLAMA = dict(attention_bias=True, mlp_bias=True)  # its head is the embedding
QWEN3: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"],
    num_key_value_heads=1,  # on both ranks
    head_dim=12,
    tie_word_embeddings=False,
    attention_bias=True,
)


def workload() -> list[Job]:
    """Prompts of 1 to 40 tokens with a common beginning; greedy, and sampled in each way, with seeds and without."""
    rng = random.Random(1)
    common = [rng.randrange(ODD_VOCAB_SIZE) for _ in range(20)]
    ways: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=0.0, min_tokens=10),
        dict(temperature=0.9, seed=7),
        dict(temperature=1.1, top_p=0.8),
        dict(temperature=1.0, top_k=10, top_p=0.9, seed=8),
        dict(temperature=1.0, seed=9, repetition_penalty=1.3, logprobs=2, prompt_logprobs=1),
    ]
    jobs = []
    for index in range(8):
        tail = [rng.randrange(ODD_VOCAB_SIZE) for _ in range(rng.choice([1, 4, 20]))]
        params = SamplingParams(max_tokens=10, **ways[index % len(ways)])
        jobs.append(Job(f"job-{index}", tuple(common + tail if index % 2 else tail), params, joins_at_step=2 * index))
    return jobs


def run(folder: Path, **options: Any) -> tuple[dict[str, list[int]], EngineReady]:
    """A small budget and few blocks: prompts come in chunks, and some requests are preempted."""
    fixed: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_blocks=10, block_size=8, seed=0)
    limits: dict[str, Any] = dict(max_num_batched_tokens=24, max_num_seqs=6, max_model_len=64)
    core, ready = build_engine(EngineArgs(str(folder), **(fixed | limits | options)))
    try:
        result = run_jobs(core, workload())
    finally:
        core.shutdown()
    assert result.stats.preemptions > 0
    return result.tokens, ready


@pytest.mark.parametrize(
    ("model", "async_scheduling"), [(LLAMA, True), (QWEN3, False)], ids=["llama, async", "qwen3, sync"]
)
def test_two_ranks_answer_as_one(tmp_path: Path, model: dict[str, Any], async_scheduling: bool) -> None:
    folder = make_random_checkpoint(tmp_path / "model", **model)
    alone, _ = run(folder)
    divided, ready = run(folder, tensor_parallel_size=2, async_scheduling=async_scheduling)
    assert divided == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)  # the requests' answers tell them apart
    assert any("executor=multiproc" in sentence for sentence in ready.decisions)
