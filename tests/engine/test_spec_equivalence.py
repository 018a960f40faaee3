"""Guessing ahead changes no request's tokens, log probabilities or end, whoever guesses, and however it is scheduled.

Each request is compared with the same request alone in an engine that guesses nothing. Float32, plain kernels; free KV
memory holds NaN, that of draft models too, and every message to the worker goes through its wire form. The drafters are
prompt lookup, a model that is always right because it is the same one, and one that is nearly always wrong.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inferd.engine.config import EngineArgs, SpeculativeArgs
from inferd.engine.core.step import EngineCore
from inferd.engine.grammar.llguidance import LLGuidanceBackend
from inferd.engine.grammar.manager import GrammarManager
from inferd.engine.grammar.scheduling import StructuredRequests
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.grammar.vocabulary import read_vocabulary
from inferd.engine.logprobs import TokenLogprobs, join
from inferd.engine.messages import EngineOutput, FinishReason
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.spec import desk
from inferd.engine.testing.grammar import InlineCompiler
from inferd.engine.testing.jobs import Job, Run, run_jobs
from inferd.engine.testing.kv import poison_kv_cache
from inferd.engine.testing.model_folder import IM_END_ID, make_model_folder
from inferd.engine.testing.wire_executor import WireExecutor

VOCAB = 271
EOS = (IM_END_ID, *range(0, 250, 12))
MAX_MODEL_LEN = 64
MAX_TOKENS = 20
AMPLE_BLOCKS = 600
LOGPROB_TOLERANCE = 2e-4  # of float32 sums in another order
SHAPE: dict[str, Any] = dict(
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
GEMMA: dict[str, Any] = dict(
    head_dim=16,
    sliding_window=8,
    query_pre_attn_scalar=9,
    layer_types=["sliding_attention", "full_attention"],
    tie_word_embeddings=False,
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {"llama": ("Llama", {}), "gemma3": ("Gemma3", GEMMA)}
TIGHT_BLOCKS = {"llama": 19, "gemma3": 36}

BLANKS = {ord(character): -100.0 for character in " \t\r\n"}  # else a random model writes little but blanks
WISHES: list[dict[str, Any]] = [
    dict(),
    dict(repetition_penalty=1.7),
    dict(presence_penalty=1.5, frequency_penalty=0.7, logprobs=2),
    dict(repetition_penalty=0.8, frequency_penalty=-0.4, ignore_eos=True),
    dict(logit_bias={20: 3.5, 41: -100.0, 77: 6.0, 100: 100.0}, frequency_penalty=2.0),
    dict(allowed_token_ids=[*range(30, 36), 12], prompt_logprobs=1),
    dict(bad_words_token_ids=[[50], [60, 61]], presence_penalty=2.0, prompt_logprobs=0, logprobs=3),
    dict(min_tokens=9, stop_token_ids=[33, 44], logprobs=1),
    dict(min_tokens=5, logit_bias=dict.fromkeys(EOS, 50.0)),
    dict(logprobs=-1, prompt_logprobs=2, ignore_eos=True),
    dict(structured_output=StructuredOutput(regex="(ab|cd)+[0-9]{2}!"), logit_bias=BLANKS),
    dict(structured_output=StructuredOutput(choice=["yes, of course", "no"])),
    dict(structured_output=StructuredOutput(regex="(x123y){2,4}!"), logprobs=1, min_tokens=4),
]
QUOTED = tuple(b"x123y, yes, of course")  # by grammars that leave little choice
LIMITS: list[dict[str, Any]] = [
    dict(),
    dict(top_p=0.8),
    dict(min_p=0.1),
    dict(top_k=12, min_p=0.02, top_p=0.95, temperature=1.3),
]


def workload() -> list[Job]:
    """Each wish greedily and seeded; every other prompt begins like others, some repeat themselves; half join late."""
    rng = random.Random(11)
    common = tuple(rng.randrange(10, 250) for _ in range(18))
    limits = itertools.cycle(LIMITS)
    jobs = []
    for index, wish in enumerate([*WISHES, *WISHES]):
        params = dict(max_tokens=MAX_TOKENS, temperature=0.0) | wish
        if index >= len(WISHES):
            params |= dict(temperature=0.8, seed=index * 977) | next(limits)
        tail = tuple(rng.randrange(10, 250) for _ in range(rng.choice([1, 3, 7]))) * rng.choice([1, 2, 3])
        prompt = QUOTED if "structured_output" in wish else common + tail if index % 2 else tail
        jobs.append(Job(f"job-{index}", prompt, SamplingParams(**params), joins_at_step=max(0, index - len(WISHES))))
    return jobs


class Models:
    """Folders of random models over one vocabulary."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, family: str, seed: int = 3) -> Path:
        folder = self._root / f"{family}-{seed}"
        if folder.exists():
            return folder
        make_model_folder(folder)
        kind, changes = FAMILIES[family]
        torch.manual_seed(seed)
        model_class = getattr(transformers, f"{kind}ForCausalLM")
        model_class(model_class.config_class(**(SHAPE | changes))).float().save_pretrained(folder)
        return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("speculation"))


@pytest.fixture(autouse=True)
def never_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad drafts are made to the end."""
    monkeypatch.setattr(desk, "break_even_share", lambda num_rows, num_fixed_rows: 0.0)


MakeEngine = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def make_engine(models: Models) -> Iterator[MakeEngine]:
    cores = []

    def make(family: str, drafter: str = "none", **changes: Any) -> EngineCore:
        folder = models(family)
        options: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_threads=1, block_size=4)
        options |= dict(max_num_seqs=32, num_blocks=AMPLE_BLOCKS, speculative=speculation(models, family, drafter))
        config = resolve(EngineArgs(str(folder), **(options | changes)))
        executor = WireExecutor(config)
        cores.append(core := EngineCore(config, executor, grammar=make_grammars(folder, config.model.eos_token_ids)))
        poison_kv_cache(executor.worker)
        return core

    yield make
    for core in cores:
        core.shutdown()


def speculation(models: Models, family: str, drafter: str) -> SpeculativeArgs | None:
    match drafter:
        case "ngram":
            return SpeculativeArgs("ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
        case "right":
            return SpeculativeArgs("draft", num_speculative_tokens=3, model=str(models(family)))
        case "wrong":
            return SpeculativeArgs("draft", num_speculative_tokens=5, model=str(models("llama", seed=8)))
    return None


def make_grammars(folder: Path, eos_token_ids: tuple[int, ...]) -> StructuredRequests:
    compiler = InlineCompiler(LLGuidanceBackend(read_vocabulary(folder, VOCAB, eos_token_ids)))
    return StructuredRequests(GrammarManager(compiler, VOCAB, eos_token_ids, cache_bytes=1 << 24), ["llguidance"])


Answer = tuple[list[int], FinishReason, list[EngineOutput]]


def answers_of(run: Run) -> dict[str, Answer]:
    return {name: (run.tokens[name], run.reasons[name], run.outputs[name]) for name in run.tokens}


@pytest.fixture(scope="module")
def alone(make_engine: MakeEngine) -> Callable[[str], dict[str, Answer]]:
    found: dict[str, dict[str, Answer]] = {}

    def answers(family: str) -> dict[str, Answer]:
        if family not in found:
            core, found[family] = make_engine(family, max_num_seqs=1, enable_prefix_caching=False), {}
            for job in workload():
                found[family] |= answers_of(run_jobs(core, [replace(job, joins_at_step=0)]))
        return found[family]

    return answers


TIGHT = "tight"
SCHEDULES: dict[str, dict[str, Any]] = {
    "batch": {},
    "one-token": dict(max_num_batched_tokens=1),
    "chunks": dict(max_num_batched_tokens=7),
    "preempted": dict(num_blocks=TIGHT),
    "preempted-chunks": dict(num_blocks=TIGHT, max_num_batched_tokens=16, async_scheduling=True),
    "ahead": dict(async_scheduling=True),
    "uncached": dict(enable_prefix_caching=False, share_prefix_attention=False, long_prefill_token_threshold=3),
}
# Each drafter with each schedule on one family or the other.
CASES = [
    (drafter, schedule, ("llama", "gemma3")[(row + column) % 2])
    for row, drafter in enumerate(["ngram", "right", "wrong"])
    for column, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("drafter", "schedule", "family"), CASES)
def test_answers_do_not_depend_on_drafts(
    make_engine: MakeEngine, alone: Callable[[str], dict[str, Answer]], drafter: str, schedule: str, family: str
) -> None:
    check(make_engine, alone(family), drafter, schedule, family)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "schedule", "family"), [(d, s, {"llama": "gemma3"}.get(f, "llama")) for d, s, f in CASES]
)
def test_answers_do_not_depend_on_drafts_on_the_other_family(
    make_engine: MakeEngine, alone: Callable[[str], dict[str, Answer]], drafter: str, schedule: str, family: str
) -> None:
    check(make_engine, alone(family), drafter, schedule, family)


def check(make_engine: MakeEngine, expected: dict[str, Answer], drafter: str, schedule: str, family: str) -> None:
    options = dict(SCHEDULES[schedule])
    is_tight = options.get("num_blocks") == TIGHT
    if is_tight:
        options["num_blocks"] = TIGHT_BLOCKS[family]
    run = run_jobs(make_engine(family, drafter, **options), workload())
    for name, (tokens, reason, outputs) in answers_of(run).items():
        assert (tokens, reason) == expected[name][:2], name
        for field in ("logprobs", "prompt_logprobs"):
            check_same(parts_of(outputs, field), parts_of(expected[name][2], field))
    assert (run.stats.preemptions > 0) == is_tight
    if schedule == "one-token":  # a draft would be a second one
        assert run.stats.drafted == []
    else:
        assert run.stats.drafted[0] > 20
        assert run.stats.accepted[0] >= {"ngram": 5, "right": 30, "wrong": 0}[drafter]


def parts_of(outputs: list[EngineOutput], field: str) -> list[TokenLogprobs]:
    parts = [getattr(output, field) for output in outputs if getattr(output, field) is not None]
    if field == "logprobs":
        assert not parts or [part.num_tokens for part in parts] == [len(o.new_token_ids) for o in outputs]
    return parts


def check_same(mine: list[TokenLogprobs], theirs: list[TokenLogprobs]) -> None:
    assert bool(mine) == bool(theirs)
    if not mine:
        return
    own, other = join(mine), join(theirs)
    assert (own.width, own.num_tokens) == (other.width, other.num_tokens)
    for (ids, values, rank), (other_ids, other_values, other_rank) in zip(own.entries(), other.entries(), strict=True):
        assert (ids[0], rank) == (other_ids[0], other_rank)
        assert values == pytest.approx(other_values, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(max_num_batched_tokens=9),
        dict(num_blocks=TIGHT),
        dict(num_blocks=TIGHT, async_scheduling=True, max_num_batched_tokens=16),
    ],
    ids=["batch", "chunks", "preempted", "ahead"],
)
def test_a_draft_model_that_is_the_model_is_always_right(
    make_engine: MakeEngine, family: str, options: dict[str, Any]
) -> None:
    """So its keys and values are those of the request: after refusals, hits, chunks and preemption."""
    if options.get("num_blocks") == TIGHT:
        options = options | dict(num_blocks=TIGHT_BLOCKS[family])
    jobs = [replace(job, params=SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)) for job in workload()]
    run = run_jobs(make_engine(family, "right", **options), jobs)
    assert run.stats.accepted == run.stats.drafted
    assert sum(run.stats.accepted) > 100
    assert run.stats.prefix_hit_tokens > 0
    assert (run.stats.preemptions > 0) == ("num_blocks" in options)


def test_a_draft_model_catches_up_after_a_pause(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled hot, what the model says is rarely what is likeliest: drafts stop, and are tried again."""
    monkeypatch.undo()
    params = SamplingParams(temperature=2.0, seed=5, max_tokens=40, ignore_eos=True)
    jobs = [Job(f"job-{index}", (20 + index, 30), params) for index in range(3)]
    core = make_engine("llama", "right")
    hot = run_jobs(core, jobs)
    assert hot.tokens == run_jobs(make_engine("llama"), jobs).tokens
    # The same beginnings, whose blocks the draft model has only in part.
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    again = [Job(f"again-{job.request_id}", (*job.prompt, *hot.tokens[job.request_id]), greedy) for job in jobs]
    before = core.stats()
    run = run_jobs(core, again)
    assert run.stats.prefix_hit_tokens > before.prefix_hit_tokens
    assert sum(before.accepted) < sum(before.drafted)
    new = sum(run.stats.drafted) - sum(before.drafted)
    assert sum(run.stats.accepted) - sum(before.accepted) == new
    assert new > 15
