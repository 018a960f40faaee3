"""Whatever the scheduler does to a request, its tokens are those of the request alone.

Greedy requests are compared with transformers recomputing everything for every token; seeded ones with the same
request alone in the engine. Free KV memory holds NaN, and every message to the worker goes through its wire form.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from inferd.engine.config import EngineArgs
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.core.step import EngineCore
from inferd.engine.executor.uniproc import UniProcExecutor
from inferd.engine.messages import AddRequest, FinishReason, SchedulerStats
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.testing.kv import poison_kv_cache

VOCAB = 199
EOS = tuple(range(0, VOCAB, 12))  # so many that some answers end by themselves
MAX_MODEL_LEN = 64
NUM_REQUESTS = 20
UNLIMITED = 4096  # tokens in a step: everything at once
BUDGETS = (1, 2, 3, 7, UNLIMITED)
AMPLE_BLOCKS = 400
TIGHT_BLOCKS = {4: 18, 16: 6}  # by block size, with the null block: little more than one request of the longest context

SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    max_position_embeddings=MAX_MODEL_LEN,
    initializer_range=0.3,  # far enough apart that rounding does not decide between two tokens
    eos_token_id=list(EOS),
    bos_token_id=None,
    pad_token_id=None,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(num_attention_heads=4, num_key_value_heads=2, head_dim=20, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(num_attention_heads=4, num_key_value_heads=1, head_dim=12, tie_word_embeddings=False)),
}


@dataclass(frozen=True)
class Job:
    """One request of the workload."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    joins_at_step: int


def workload() -> list[Job]:
    """Lengths from 1 to 40, some with a common beginning; two in three greedy; half join while others run."""
    rng = random.Random(4)
    common = tuple(rng.randrange(10, VOCAB) for _ in range(21))
    seeded = itertools.cycle([dict(), dict(top_p=0.9), dict(top_k=20), dict(top_k=20, top_p=0.9)])
    jobs = []
    for index in range(NUM_REQUESTS):
        tail = tuple(rng.randrange(10, VOCAB) for _ in range(rng.choice([1, 2, 5, 9, 17, 19])))
        limits: dict[str, Any] = dict(max_tokens=rng.choice([4, 11, 18]), ignore_eos=index % 4 == 1)
        if index % 3 == 2:
            limits |= dict(temperature=0.8, seed=index * 7919, **next(seeded))
        else:
            limits |= dict(temperature=0.0, min_tokens=limits["max_tokens"] // 2)
        joins_at_step = 0 if index < NUM_REQUESTS // 2 else 2 * (index - NUM_REQUESTS // 2)
        prompt = common[: rng.choice([16, 21])] + tail if index % 2 else tail
        jobs.append(Job(f"job-{index}", prompt, SamplingParams(**limits), joins_at_step))
    return jobs


class WireExecutor(UniProcExecutor):
    """Sends every step and its result through bytes, as other executors do."""

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        return super().execute_model(msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=SchedulerOutput))

    def sample_tokens(self, bitmask: Any | None = None) -> Future[ModelRunnerOutput]:
        result = super().sample_tokens(bitmask).result()
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=ModelRunnerOutput))
        return future


@dataclass(frozen=True)
class Run:
    tokens: dict[str, list[int]]
    reasons: dict[str, FinishReason]
    stats: SchedulerStats


def make_core(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = dict(
        dtype="float32",
        device="cpu",
        kernels="torch",
        num_threads=1,
        max_num_seqs=NUM_REQUESTS,
        num_blocks=AMPLE_BLOCKS,
    )
    config = resolve(EngineArgs(str(folder), **(options | changes)))
    executor = WireExecutor(config)
    core = EngineCore(config, executor)
    poison_kv_cache(executor.worker)
    return core


def run(core: EngineCore, jobs: Iterable[Job]) -> Run:
    """Drive the engine until every job is done; jobs join at their steps, or when there is nothing else to do."""
    waiting = sorted(jobs, key=lambda job: job.joins_at_step)
    tokens: dict[str, list[int]] = {job.request_id: [] for job in waiting}
    reasons: dict[str, FinishReason] = {}
    step = 0
    while waiting or core.has_work:
        while waiting and (waiting[0].joins_at_step <= step or not core.has_work):
            job = waiting.pop(0)
            core.add(AddRequest(job.request_id, list(job.prompt), job.params, 0.0))
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                assert output.request_id not in reasons
                reasons[output.request_id] = output.finish_reason
        step += 1
    assert set(reasons) == set(tokens)
    stats = core.stats()
    assert stats.blocks_free == stats.blocks_total
    return Run(tokens, reasons, stats)


def recompute_greedily(model: Any, job: Job) -> list[int]:
    """No cache, no batch: the whole sequence again for every token."""
    token_ids = list(job.prompt)
    for num_output in range(job.params.max_tokens or 0):
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].clone()
            if num_output < job.params.min_tokens:
                logits[list(EOS)] = -torch.inf
            token_ids.append(int(logits.argmax()))
        if token_ids[-1] in EOS and not job.params.ignore_eos:
            break
    return token_ids[len(job.prompt) :]


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("equivalence")


@pytest.fixture(scope="session", params=MODELS)
def expected(request: pytest.FixtureRequest, models_folder: Path) -> tuple[Path, dict[str, list[int]]]:
    """A saved random model and what every job of the workload must answer with it."""
    family, changes = MODELS[request.param]
    folder = models_folder / request.param
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**(SHAPE | changes)))
    model.eval().float().save_pretrained(folder)
    jobs = workload()
    answers = {job.request_id: recompute_greedily(model, job) for job in jobs if job.params.greedy}
    alone = [replace(job, joins_at_step=0) for job in jobs if not job.params.greedy]
    for job in alone:
        answers |= run(make_core(folder, max_num_seqs=1, max_num_batched_tokens=UNLIMITED), [job]).tokens
    return folder, answers


@pytest.mark.parametrize("pool", ["ample", "tight"])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("budget", BUDGETS)
def test_tokens_do_not_depend_on_scheduling(
    expected: tuple[Path, dict[str, list[int]]], budget: int, block_size: int, pool: str
) -> None:
    folder, answers = expected
    core = make_core(
        folder,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=AMPLE_BLOCKS if pool == "ample" else TIGHT_BLOCKS[block_size],
    )
    result = run(core, workload())
    assert result.tokens == answers
    # With one token a step only one request ever runs, and it has the pool to itself.
    assert (result.stats.preemptions > 0) == (pool == "tight" and budget > 1)


@pytest.mark.parametrize("budget", [7, UNLIMITED])
def test_tokens_do_not_depend_on_kernels(expected: tuple[Path, dict[str, list[int]]], budget: int) -> None:
    folder, answers = expected
    assert run(make_core(folder, max_num_batched_tokens=budget, kernels="auto"), workload()).tokens == answers


def test_tokens_do_not_depend_on_sharing(expected: tuple[Path, dict[str, list[int]]]) -> None:
    folder, answers = expected
    shared = run(make_core(folder, block_size=4), workload())
    apart = run(make_core(folder, block_size=4, enable_prefix_caching=False, share_prefix_attention=False), workload())
    assert shared.tokens == apart.tokens == answers
    assert shared.stats.prefix_hit_tokens > 0
    assert apart.stats.prefix_hit_tokens == 0
    assert set(shared.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}  # the workload has both endings
