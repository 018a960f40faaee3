"""Scheduling a step before the tokens of the one before it are known changes no request's tokens.

Each request is compared with the same request alone in an engine that knows every token first. Free KV memory holds
NaN, and every message to the worker goes through its wire form.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import transformers

from inferd.engine.config import EngineArgs
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.core.step import EngineCore
from inferd.engine.executor.uniproc import UniProcExecutor
from inferd.engine.messages import FinishReason
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.testing.jobs import Job, run_jobs
from inferd.engine.testing.kv import poison_kv_cache

VOCAB = 199
EOS = tuple(range(0, VOCAB, 12))  # so many that some answers end by themselves
MAX_MODEL_LEN = 64
NUM_REQUESTS = 16
UNLIMITED = 4096
AMPLE_BLOCKS = 400
TIGHT_BLOCKS = 20  # of 4 tokens, with the null block: little more than one request of the longest context
CONFIG: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_MODEL_LEN,
    initializer_range=0.3,  # far enough apart that rounding does not decide between two tokens
    eos_token_id=list(EOS),
    bos_token_id=None,
    pad_token_id=None,
)


def workload() -> list[Job]:
    """Half greedy, half seeded; some share a beginning, half join while others run, two clients in both lanes."""
    rng = random.Random(8)
    common = tuple(rng.randrange(10, VOCAB) for _ in range(18))
    sampled = itertools.cycle([dict(), dict(top_p=0.9), dict(top_k=20), dict(top_k=20, top_p=0.9)])
    jobs = []
    for index in range(NUM_REQUESTS):
        prompt = tuple(rng.randrange(10, VOCAB) for _ in range(rng.choice([1, 3, 9, 17])))
        limits: dict[str, Any] = dict(max_tokens=rng.choice([1, 9, 20]), ignore_eos=index % 4 == 1)
        limits["min_tokens"] = limits["max_tokens"] // 3
        if index % 2:
            params = SamplingParams(temperature=0.8, seed=index * 7919, **next(sampled), **limits)
        else:
            params = SamplingParams(temperature=0.0, stop_token_ids=[index + 1], **limits)
        jobs.append(
            Job(
                f"job-{index}",
                common + prompt if index % 3 == 0 else prompt,
                params,
                joins_at_step=0 if index < NUM_REQUESTS // 2 else 2 * (index - NUM_REQUESTS // 2),
                priority=index % 3,
                client=f"client-{index % 2}",
                lane="batch" if index % 5 == 0 else "interactive",
            )
        )
    return jobs


class WireExecutor(UniProcExecutor):
    """Sends every step and its result through bytes, as other executors do."""

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        return super().execute_model(msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=SchedulerOutput))

    def sample_tokens(self, bitmask: Any | None = None) -> Future[ModelRunnerOutput]:
        sampled, future = super().sample_tokens(bitmask), Future[ModelRunnerOutput]()
        sampled.add_done_callback(lambda done: _pass_on(done, future))
        return future


def _pass_on(done: Future[ModelRunnerOutput], future: Future[ModelRunnerOutput]) -> None:
    if (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(msgspec.msgpack.decode(msgspec.msgpack.encode(done.result()), type=ModelRunnerOutput))


MakeEngine = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("async") / "llama"
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).float().save_pretrained(folder)
    cores = []

    def make(**changes: Any) -> EngineCore:
        options: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_threads=1, block_size=4)
        options |= dict(max_num_seqs=NUM_REQUESTS, num_blocks=AMPLE_BLOCKS) | changes
        config = resolve(EngineArgs(str(folder), **options))
        executor = WireExecutor(config)
        cores.append(core := EngineCore(config, executor))
        poison_kv_cache(executor.worker)
        return core

    yield make
    for core in cores:
        core.shutdown()


@pytest.fixture(scope="module")
def answers(make_engine: MakeEngine) -> dict[str, tuple[list[int], FinishReason]]:
    """What each job answers alone."""
    core = make_engine(max_num_seqs=1, max_num_batched_tokens=UNLIMITED, async_scheduling=False)
    found = {}
    for job in workload():
        alone = run_jobs(core, [replace(job, joins_at_step=0)])
        found[job.request_id] = alone.tokens[job.request_id], alone.reasons[job.request_id]
    assert {reason for _, reason in found.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    return found


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("num_blocks", [AMPLE_BLOCKS, TIGHT_BLOCKS], ids=["ample", "tight"])
@pytest.mark.parametrize(
    ("budget", "policy", "threshold", "caching"),
    [
        (1, "fair", 0, True),
        (7, "priority", 3, True),
        (7, "fcfs", 0, False),
        (UNLIMITED, "fair", 5, True),
        (UNLIMITED, "priority", 0, False),
        (UNLIMITED, "fcfs", 0, True),
    ],
)
def test_tokens_do_not_depend_on_scheduling(
    make_engine: MakeEngine,
    answers: dict[str, tuple[list[int], FinishReason]],
    is_async: bool,
    num_blocks: int,
    budget: int,
    policy: str,
    threshold: int,
    caching: bool,
) -> None:
    core = make_engine(
        async_scheduling=is_async,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        scheduling_policy=policy,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=caching,
    )
    jobs = [replace(job, priority=0) if policy == "fcfs" else job for job in workload()]  # which has no priorities
    result = run_jobs(core, jobs)
    assert {name: (result.tokens[name], result.reasons[name]) for name in result.tokens} == answers
    assert (result.stats.preemptions > 0) == (num_blocks == TIGHT_BLOCKS and budget > 1)


def test_requests_that_leave_disturb_nobody(
    make_engine: MakeEngine, answers: dict[str, tuple[list[int], FinishReason]]
) -> None:
    jobs = [replace(job, leaves_after_steps=index) if index % 3 == 1 else job for index, job in enumerate(workload())]
    result = run_jobs(make_engine(async_scheduling=True, num_blocks=TIGHT_BLOCKS), jobs)
    assert FinishReason.ABORT in result.reasons.values()
    for name, reason in result.reasons.items():
        tokens, expected = answers[name]
        if reason is FinishReason.ABORT:
            assert result.tokens[name] == tokens[: len(result.tokens[name])]
        else:
            assert (result.tokens[name], reason) == (tokens, expected)


def test_a_worker_that_fails_is_fatal_to_the_step_that_waits_for_it(make_engine: MakeEngine) -> None:
    core = make_engine(async_scheduling=True)
    for job in workload()[:2]:
        run_jobs(core, [replace(job, joins_at_step=0)])
    core._executor.worker.runner.execute = lambda output: 1 / 0  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        run_jobs(core, [replace(workload()[2], request_id="lost", joins_at_step=0)])
