"""What a request asks of sampling is done to it alike, alone or in a batch, in chunks, preempted, or one step ahead.

Greedy requests are compared with transformers recomputing everything for every token, its own logits processors in
between; seeded ones with the same request alone in the engine, and with transformers' kept tokens. Float32; free KV
memory holds NaN, and every message to the worker goes through its wire form.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inferd.engine.config import EngineArgs
from inferd.engine.core.step import EngineCore
from inferd.engine.logprobs import TokenLogprobs, join
from inferd.engine.messages import FinishReason
from inferd.engine.params import MAX_LOGPROBS, RepetitionDetection, SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.testing.jobs import Job, Run, run_jobs
from inferd.engine.testing.kv import poison_kv_cache
from inferd.engine.testing.wire_executor import WireExecutor

VOCAB = 199
EOS = tuple(range(0, VOCAB, 12))
MAX_MODEL_LEN = 64
AMPLE_BLOCKS = 400
TIGHT_BLOCKS = 18
MAX_TOKENS = 20
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
LOGPROB_TOLERANCE = 2e-4  # of float32 sums in another order

WISHES: list[dict[str, Any]] = [
    dict(repetition_penalty=1.7),
    dict(repetition_penalty=0.8, logprobs=2),
    dict(presence_penalty=1.5, frequency_penalty=0.7),
    dict(presence_penalty=-1.0, repetition_penalty=1.3, logprobs=0),
    dict(logit_bias={20: 3.5, 41: -100.0, 77: 6.0, 100: 100.0}, frequency_penalty=2.0),
    dict(allowed_token_ids=[*range(30, 60), 12], prompt_logprobs=1),
    dict(allowed_token_ids=[*range(30, 60)], logit_bias={35: 4.0, 150: 100.0}, repetition_penalty=1.4),
    dict(bad_words_token_ids=[[50], [60, 61]], presence_penalty=2.0, prompt_logprobs=0, logprobs=3),
    dict(min_tokens=9, stop_token_ids=[33, 44], logprobs=1),
    dict(min_tokens=5, logit_bias=dict.fromkeys(EOS, 50.0)),
    dict(prompt_logprobs=5),
    dict(logprobs=-1, prompt_logprobs=-1),
    {},
]
LIMITS: list[dict[str, Any]] = [
    dict(),
    dict(top_p=0.8),
    dict(min_p=0.1),
    dict(top_k=12, min_p=0.02, top_p=0.95, temperature=1.3),
]


def workload() -> list[Job]:
    """Each wish greedily and sampled; every other prompt begins like others; half join while others run."""
    rng = random.Random(11)
    common = tuple(rng.randrange(10, VOCAB) for _ in range(18))
    limits = itertools.cycle(LIMITS)
    jobs = []
    for index, wish in enumerate([*WISHES, *WISHES]):
        params = dict(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=index % 3 == 0) | wish
        if index >= len(WISHES):
            params |= dict(temperature=0.8, seed=index * 977) | next(limits)
        tail = tuple(rng.randrange(10, VOCAB) for _ in range(rng.choice([1, 3, 8, 15])))
        prompt = common + tail if index % 2 else tail
        jobs.append(Job(f"job-{index}", prompt, SamplingParams(**params), joins_at_step=max(0, index - len(WISHES))))
    return jobs


@dataclass
class Scores:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one a token
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # at most one


def scores_of(run: Run) -> dict[str, Scores]:
    found = {request_id: Scores() for request_id in run.outputs}
    for request_id, outputs in run.outputs.items():
        for output in outputs:
            found[request_id].token_ids += output.new_token_ids
            if output.logprobs is not None:
                assert output.logprobs.num_tokens == len(output.new_token_ids)
                found[request_id].logprobs.append(output.logprobs)
            if output.prompt_logprobs is not None:
                assert not found[request_id].prompt_logprobs
                found[request_id].prompt_logprobs.append(output.prompt_logprobs)
    return found


def make_core(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = dict(
        dtype="float32", device="cpu", kernels="torch", num_threads=1, block_size=4, num_blocks=AMPLE_BLOCKS
    )
    config = resolve(EngineArgs(str(folder), **(options | changes)))
    executor = WireExecutor(config)
    core = EngineCore(config, executor)
    poison_kv_cache(executor.worker)
    return core


class Oracle:
    """Transformers, recomputing everything."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def raw_logprobs(self, token_ids: list[int]) -> Tensor:
        """[len, vocab]: line i is about token i + 1."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
        return torch.log_softmax(logits, dim=-1)

    def logits(self, token_ids: list[int], num_prompt: int, params: SamplingParams) -> Tensor:
        """[1, vocab] of the next token, after all that comes before temperature."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids]), use_cache=False).logits[:, -1].float()
        output = token_ids[num_prompt:]
        processors = LogitsProcessorList()
        if params.allowed_token_ids is not None:
            others = sorted(set(range(VOCAB)) - set(params.allowed_token_ids))
            processors.append(SuppressTokensLogitsProcessor(others, device="cpu"))
        if params.bad_words_token_ids:
            processors.append(NoBadWordsLogitsProcessor(params.bad_words_token_ids, eos_token_id=None))
        if len(output) < params.min_tokens:
            processors.append(SuppressTokensLogitsProcessor([*EOS, *params.stop_token_ids], device="cpu"))
        if params.logit_bias:
            processors.append(
                SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()])
            )
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        logits = processors(torch.tensor([token_ids]), logits)
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
        return logits - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty

    def greedy(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        token_ids = list(prompt)
        for num_output in range(1, MAX_TOKENS + 1):
            token_ids.append(int(self.logits(token_ids, len(prompt), params).argmax()))
            ends = token_ids[-1] in params.stop_token_ids or (token_ids[-1] in EOS and not params.ignore_eos)
            if ends and num_output >= params.min_tokens:
                break
        return token_ids[len(prompt) :]

    def kept(self, token_ids: list[int], num_prompt: int, params: SamplingParams) -> Tensor:
        """Ids that may be drawn next."""
        logits = TemperatureLogitsWarper(params.temperature)(None, self.logits(token_ids, num_prompt, params))
        if params.min_p:
            logits = MinPLogitsWarper(params.min_p)(None, logits)
        if params.top_k:
            logits = TopKLogitsWarper(params.top_k)(None, logits)
        if params.top_p < 1.0:
            logits = TopPLogitsWarper(params.top_p)(None, logits)
        return logits[0].isfinite().nonzero()[:, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling-equivalence")
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval().float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Scores]:
    """Every job by itself, its whole prompt in one step, one engine after the other step."""
    core = make_core(folder, max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=4096)
    found: dict[str, Scores] = {}
    for job in workload():
        found |= scores_of(run_jobs(core, [job]))
    return found


def pairs(alone: dict[str, Scores]) -> Iterator[tuple[Job, Scores]]:
    return ((job, alone[job.request_id]) for job in workload())


def test_greedy_answers_are_those_of_transformers(oracle: Oracle, alone: dict[str, Scores]) -> None:
    for job, scores in pairs(alone):
        if job.params.greedy:
            assert scores.token_ids == oracle.greedy(job.prompt, job.params), job


def test_only_kept_tokens_are_drawn(oracle: Oracle, alone: dict[str, Scores]) -> None:
    for job, scores in pairs(alone):
        if not job.params.greedy:
            token_ids = list(job.prompt)
            for token_id in scores.token_ids:
                assert token_id in oracle.kept(token_ids, len(job.prompt), job.params), job
                token_ids.append(token_id)


def test_logprobs_are_those_of_the_model(oracle: Oracle, alone: dict[str, Scores]) -> None:
    """Before temperature, penalties and bans; of prompt and output."""
    for job, scores in pairs(alone):
        raw = oracle.raw_logprobs([*job.prompt, *scores.token_ids])
        split = len(job.prompt) - 1
        check_logprobs(scores.prompt_logprobs, raw[:split], job.prompt[1:], job.params.prompt_logprobs)
        check_logprobs(scores.logprobs, raw[split:], scores.token_ids, job.params.logprobs)


def check_logprobs(parts: list[TokenLogprobs], raw: Tensor, token_ids: Any, num_top: int | None) -> None:
    if num_top is None:
        assert not parts
        return
    entries = list(join(parts).entries())
    assert len(entries) == len(token_ids)
    num_top = VOCAB if num_top == -1 else num_top
    for line, token_id, (ids, values, rank) in zip(raw, token_ids, entries, strict=False):
        assert ids[0] == token_id
        assert len(ids) == len(values) == num_top + 1
        assert (line[ids] - torch.tensor(values)).abs().max() < LOGPROB_TOLERANCE
        assert values[1:] == sorted(values[1:], reverse=True)
        assert line.topk(num_top).indices.tolist() == ids[1:] if num_top else len(ids) == 1
        assert rank == int((line >= line[token_id]).sum())


SCHEDULES: dict[str, dict[str, Any]] = {
    "batch": {},
    "one-token": dict(max_num_batched_tokens=1),
    "chunks": dict(max_num_batched_tokens=7),
    "preempted": dict(num_blocks=TIGHT_BLOCKS),
    "preempted-chunks": dict(num_blocks=TIGHT_BLOCKS, max_num_batched_tokens=16),
    "ahead": dict(async_scheduling=True, num_blocks=TIGHT_BLOCKS),
    "uncached": dict(enable_prefix_caching=False, share_prefix_attention=False),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_answers_do_not_depend_on_scheduling(folder: Path, alone: dict[str, Scores], schedule: str) -> None:
    run = run_jobs(make_core(folder, max_num_seqs=len(workload()), **SCHEDULES[schedule]), workload())
    for request_id, scores in scores_of(run).items():
        expected = alone[request_id]
        assert scores.token_ids == expected.token_ids, request_id
        for mine, theirs in ((scores.logprobs, expected.logprobs), (scores.prompt_logprobs, expected.prompt_logprobs)):
            assert bool(mine) == bool(theirs)
            check_same(join(mine), join(theirs))
    assert (run.stats.preemptions > 0) == (SCHEDULES[schedule].get("num_blocks") == TIGHT_BLOCKS)


def check_same(mine: TokenLogprobs, theirs: TokenLogprobs) -> None:
    assert (mine.width, mine.num_tokens) == (theirs.width, theirs.num_tokens)
    for (ids, values, rank), (other_ids, other_values, other_rank) in zip(
        mine.entries(), theirs.entries(), strict=True
    ):
        assert (ids[0], rank) == (other_ids[0], other_rank)
        assert values == pytest.approx(other_values, abs=LOGPROB_TOLERANCE)
        if mine.width <= MAX_LOGPROBS + 1:  # further down rounding decides which comes first
            assert ids == other_ids


def test_prompt_logprobs_read_nothing_from_the_cache(folder: Path) -> None:
    core = make_core(folder)
    job = Job("first", tuple(range(40, 60)), SamplingParams(temperature=0.0, max_tokens=2))
    run_jobs(core, [job])
    scored = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    scores = scores_of(run_jobs(core, [Job("scored", job.prompt, scored)]))["scored"]
    assert scores.prompt_logprobs[0].num_tokens == 19
    assert run_jobs(core, [Job("again", job.prompt, job.params)]).outputs["again"][0].num_cached_tokens == 16


def test_a_prompt_of_one_token_has_no_logprobs_but_says_so(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    scores = scores_of(run_jobs(make_core(folder), [Job("one", (40,), params)]))["one"]
    assert [part.num_tokens for part in scores.prompt_logprobs] == [0]


def test_a_request_that_forbids_everything_fails_alone(folder: Path) -> None:
    impossible = SamplingParams(allowed_token_ids=[EOS[1]], min_tokens=3, temperature=0.7)
    fine = SamplingParams(temperature=0.0, max_tokens=3)
    jobs = [Job("impossible", (40, 41), impossible), Job("fine", (40, 41), fine)]
    run = run_jobs(make_core(folder), jobs)
    assert run.reasons["impossible"] is FinishReason.ERROR
    assert "leave no token to choose from" in str(run.outputs["impossible"][-1].error)
    assert run.tokens["fine"] == run_jobs(make_core(folder), [jobs[1]]).tokens["fine"]


def test_repetition_ends_a_request(folder: Path) -> None:
    """Tokens that are forced to repeat, as a small model at temperature 0 would do by itself."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=30,
        allowed_token_ids=[50],
        repetition_detection=RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3),
    )
    run = run_jobs(make_core(folder), [Job("parrot", (40,), params)])
    assert run.reasons["parrot"] is FinishReason.REPETITION
    assert run.tokens["parrot"] == [50] * 6
