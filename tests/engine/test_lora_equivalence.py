"""A request with an adapter is answered as by a model of its own, whatever else is in the batch.

The models of their own are PEFT's, recomputing everything for every token, and checkpoints into which an adapter was
merged, in an engine without adapters. Float32 and plain kernels, so that token by token can be compared.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inferd.engine.build import build_engine
from inferd.engine.config import EngineArgs, SpeculativeArgs
from inferd.engine.core.step import EngineCore
from inferd.engine.messages import AddRequest, Call
from inferd.engine.params import SamplingParams
from inferd.engine.testing.jobs import Job, Run, run_jobs
from inferd.engine.testing.random_adapter import make_random_adapter, merge_adapter
from inferd.engine.testing.random_checkpoint import ODD_VOCAB_SIZE, make_random_checkpoint

ADAPTERS: dict[str, dict[str, Any]] = {
    "four": dict(rank=4, seed=1),
    "eight": dict(rank=8, seed=2, targets=["q_proj", "v_proj", "down_proj"], use_rslora=True),
    "sixteen": dict(rank=16, seed=3, targets=["k_proj", "o_proj", "up_proj"], lora_alpha=5),
}
NAMES = (None, *ADAPTERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases, its adapters, and for each the model that it makes."""
    folder = tmp_path_factory.mktemp("lora")
    model = make_random_checkpoint(folder / "model", attention_bias=True, mlp_bias=True)
    for name, adapter in ADAPTERS.items():
        make_random_adapter(folder / name, model, **adapter)
        merge_adapter(folder / f"merged-{name}", model, folder / name)
    return folder


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[EngineCore]:
    fixed: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_threads=1)
    limits: dict[str, Any] = dict(block_size=8, num_blocks=200, max_num_seqs=16, max_model_len=64)
    core, _ = build_engine(EngineArgs(str(model), **(fixed | limits | options)))
    try:
        yield core
    finally:
        core.shutdown()


def call(core: EngineCore, method: str, *args: Any) -> Any:
    reply = core.call(Call(0, method, list(args)))
    assert reply is not None
    assert reply.error is None, reply.error
    return reply.result


def workload() -> list[Job]:
    """Each adapter and none with equal prompts, of which some are a beginning of others; greedy and sampled."""
    rng = random.Random(5)
    common = [rng.randrange(ODD_VOCAB_SIZE) for _ in range(24)]
    ways: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=0.9, seed=7),
        dict(temperature=0.0, repetition_penalty=1.3, logprobs=1),
    ]
    jobs = []
    for index in range(4 * len(ways)):
        tail = [rng.randrange(ODD_VOCAB_SIZE) for _ in range(rng.choice([1, 5, 12]))]
        prompt = tuple(common + tail if index % 3 else common)
        params = SamplingParams(max_tokens=8, ignore_eos=True, **ways[index // 4])
        jobs.append(Job(f"job-{index}", prompt, params, joins_at_step=index // 2, lora=NAMES[index % 4]))
    return jobs


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """Every job's answer by the model of its own, alone."""
    tokens = {}
    for name in NAMES:
        with engine(folder / (f"merged-{name}" if name else "model")) as core:
            for job in workload():
                if job.lora == name:
                    tokens |= run_jobs(core, [replace(job, lora=None, joins_at_step=0)]).tokens
    prompts = {job.request_id: (job.prompt, job.params.temperature) for job in workload()}
    told_apart = {(prompts[name], tuple(answer)) for name, answer in tokens.items()}
    assert len(told_apart) == len(tokens), "equal prompts are answered differently"
    return tokens


def run(folder: Path, **options: Any) -> Run:
    adapters: dict[str, Any] = dict(enable_lora=True, max_loras=3, max_lora_rank=16)
    guesses = options.get("speculative")
    if guesses is not None and guesses.model == BASE:
        options["speculative"] = replace(guesses, model=str(folder / "model"))
    with engine(folder / "model", **(adapters | options)) as core:
        for name in ADAPTERS:
            call(core, "add_lora", name, str(folder / name))
        return run_jobs(core, workload())


TIGHT: dict[str, Any] = dict(num_blocks=14)
BASE = "the model itself"
VARIANTS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "one token a step": dict(max_num_batched_tokens=1),
    "small steps": dict(max_num_batched_tokens=7),
    "few blocks": TIGHT,
    "few blocks, small steps, one step ahead": dict(max_num_batched_tokens=16, async_scheduling=True, **TIGHT),
    "no prefix cache": dict(enable_prefix_caching=False, share_prefix_attention=False),
    "two places": dict(max_loras=2, max_cpu_loras=3),
    "one place": dict(max_loras=1),
    "two places, few blocks, one step ahead": dict(max_loras=2, async_scheduling=True, **TIGHT),
    "a larger rank": dict(max_lora_rank=20),
    "guessed by what was there before": dict(
        speculative=SpeculativeArgs("ngram", prompt_lookup_min=1, prompt_lookup_max=2)
    ),
    "guessed by the model without adapters, few blocks": dict(
        speculative=SpeculativeArgs("draft", num_speculative_tokens=2, model=BASE), max_loras=2, **TIGHT
    ),
    "two ranks": dict(tensor_parallel_size=2),
    "two ranks, few blocks, one step ahead": dict(
        tensor_parallel_size=2, async_scheduling=True, max_loras=2, max_num_batched_tokens=16, **TIGHT
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_mixed_in_a_batch_answer_as_models_of_their_own(
    folder: Path, expected: dict[str, list[int]], variant: str
) -> None:
    options = VARIANTS[variant]
    result = run(folder, **options)
    assert result.tokens == expected
    assert (result.stats.preemptions > 0) == ("few blocks" in variant)
    if options.get("enable_prefix_caching", True):
        assert result.stats.prefix_hit_tokens > 0


def test_more_ranks_than_key_value_heads(tmp_path: Path) -> None:
    """Both hold the same head of k and v, and so the same rows of its B."""
    qwen3: dict[str, Any] = dict(
        architectures=["Qwen3ForCausalLM"], num_key_value_heads=1, head_dim=12, tie_word_embeddings=False
    )
    model = make_random_checkpoint(tmp_path / "model", **qwen3)
    adapter = make_random_adapter(tmp_path / "adapter", model, rank=4)
    jobs = workload()[:4]
    with engine(merge_adapter(tmp_path / "merged", model, adapter)) as core:
        expected = run_jobs(core, [replace(job, lora=None) for job in jobs]).tokens
    with engine(model, enable_lora=True, tensor_parallel_size=2) as core:
        call(core, "add_lora", "adapter", str(adapter))
        assert run_jobs(core, [replace(job, lora="adapter") for job in jobs]).tokens == expected


def test_adapters_come_and_go_while_requests_run(folder: Path, expected: dict[str, list[int]], tmp_path: Path) -> None:
    """One is removed while a request runs with it, and other content comes under its name, which finds no old block."""
    jobs = {(job.lora, job.params.temperature): job for job in workload() if job.params.logprobs is None}
    first, second = jobs["four", 0.0], replace(jobs["eight", 0.0], prompt=jobs["four", 0.0].prompt)
    with engine(folder / "merged-eight") as core:
        expected_second = run_jobs(core, [replace(second, lora=None, joins_at_step=0)]).tokens[second.request_id]
    with engine(folder / "model", enable_lora=True, max_loras=2) as core:
        moving = shutil.copytree(folder / "four", tmp_path / "moving")
        call(core, "add_lora", "it", str(moving))
        core.add(add_of(replace(first, lora="it")))
        tokens: dict[str, list[int]] = {first.request_id: [], second.request_id: []}
        collect(core, tokens, num_steps=3)
        assert call(core, "remove_lora", "it") == 1
        shutil.rmtree(moving)
        shutil.copytree(folder / "eight", moving)
        call(core, "add_lora", "it", str(moving))
        core.add(add_of(replace(second, lora="it")))
        infos = call(core, "list_loras")
        assert [(info.name, info.is_removed, info.num_requests) for info in infos] == [
            ("it", False, 1),
            ("it", True, 1),
        ]
        collect(core, tokens)
        assert tokens == {first.request_id: expected[first.request_id], second.request_id: expected_second}
        assert [info.is_removed for info in call(core, "list_loras")] == [False]
        assert core.stats().prefix_hit_tokens == 0
        call(core, "remove_lora", "it")
        call(core, "add_lora", "again", str(folder / "eight"))
        repeated = run_jobs(core, [replace(second, request_id="repeated", lora="again", joins_at_step=0)])
        assert repeated.tokens["repeated"] == expected_second
        assert repeated.stats.prefix_hit_tokens > 0  # what the files hold counts, not how they are named


def add_of(job: Job) -> AddRequest:
    return AddRequest(job.request_id, list(job.prompt), job.params, 0.0, lora=job.lora)


def collect(core: EngineCore, tokens: dict[str, list[int]], num_steps: int = 1000) -> None:
    for _ in range(num_steps):
        if not core.has_work:
            break
        for output in core.step().outputs:
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids


PEFT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(num_attention_heads=4, num_key_value_heads=2, head_dim=20, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(num_attention_heads=4, num_key_value_heads=1, head_dim=12, tie_word_embeddings=False)),
    "gemma3": (
        "Gemma3",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=9,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=False,
        ),
    ),
}
SHAPE: dict[str, Any] = dict(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    eos_token_id=0,
    bos_token_id=None,
    pad_token_id=None,
)
PEFT_ADAPTERS: dict[str, dict[str, Any]] = {
    "all": dict(r=8, lora_alpha=30, target_modules="all-linear"),
    "pattern": dict(r=4, lora_alpha=25, target_modules=r".*\.(q_proj|gate_proj)", use_rslora=True, lora_dropout=0.5),
    "one-layer": dict(r=16, lora_alpha=300, target_modules=["v_proj", "down_proj"], layers_to_transform=[1]),
}


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """PEFT asks transformers for what has a newer name there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("family", PEFT_MODELS)
def test_adapters_that_peft_wrote_answer_as_peft_does(tmp_path: Path, family: str) -> None:
    with quiet_libraries():
        import peft

    kind, changes = PEFT_MODELS[family]
    name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    torch.manual_seed(3)
    config = getattr(transformers, name)(**(SHAPE | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    model.save_pretrained(tmp_path / "model")
    prompt = [7, 21, 3, 150, 88]
    expected = {"none": recompute(model, prompt)}
    for adapter, fields in PEFT_ADAPTERS.items():
        with quiet_libraries():
            base = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(tmp_path / "model")
            own = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **fields)
            adapted = peft.get_peft_model(base, own).eval()
            adapted.save_pretrained(tmp_path / adapter)
            expected[adapter] = recompute(adapted, prompt)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    jobs = [Job(name, tuple(prompt), params, lora=None if name == "none" else name) for name in expected]
    with engine(tmp_path / "model", enable_lora=True, max_loras=3, max_num_batched_tokens=12) as core:
        for adapter in PEFT_ADAPTERS:
            call(core, "add_lora", adapter, str(tmp_path / adapter))
        assert run_jobs(core, jobs).tokens == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)


def recompute(model: Callable[..., Any], prompt: list[int]) -> list[int]:
    """No cache, no batch: the whole sequence again for every token."""
    token_ids = list(prompt)
    for _ in range(10):
        with torch.inference_mode():
            token_ids.append(int(model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]
