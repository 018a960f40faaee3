"""Decoders that embed, classify and reward, against transformers; chunks, caches and preemption change nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inferd.engine.build import build_engine
from inferd.engine.config import EngineArgs
from inferd.engine.core.step import EngineCore
from inferd.engine.errors import ConfigError
from inferd.engine.pooling.params import PoolingParams
from inferd.engine.testing.encoder_folder import add_sentence_files
from inferd.engine.testing.pooling_jobs import add_text, pool_all

VOCAB = 101
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=68,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=64,
    pad_token_id=0,
)
RAW = PoolingParams(normalize=False)


def make_decoder(folder: Path, class_name: str, **changes: Any) -> Any:
    """A random transformers model with every parameter off its neutral value, saved as safetensors."""
    kind = getattr(transformers, class_name)
    torch.manual_seed(3)
    model = kind(kind.config_class(**(SIZES | changes))).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    return model


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[EngineCore]:
    fixed: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_threads=1, block_size=4)
    core, _ = build_engine(EngineArgs(str(folder), **(fixed | options)))
    try:
        yield core
    finally:
        core.shutdown()


def random_texts(*lengths: int, common: int = 0) -> dict[str, list[int]]:
    source = random.Random(6)
    first = [source.randrange(1, VOCAB) for _ in range(common)]
    return {f"text-{i}": first + [source.randrange(1, VOCAB) for _ in range(n)] for i, n in enumerate(lengths)}


@torch.no_grad()
def last_hidden(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    hidden: torch.Tensor = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    return hidden


POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda hidden: hidden[-1],
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(0),
}


def assert_close(found: Sequence[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-5)


def test_qwen3_embeds_its_last_token(tmp_path: Path) -> None:
    """As embedders of that family come: a model that could generate, with the files of sentence-transformers, its
    tensors without "model." before them, and no head of logits."""
    model = make_decoder(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=True)
    add_sentence_files(tmp_path, "lasttoken")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    texts = random_texts(1, 40, 7)
    with engine(tmp_path) as core:
        found = pool_all(core, texts, PoolingParams())
        short = pool_all(core, texts, PoolingParams(dimensions=8))
    for name, tokens in texts.items():
        expected = last_hidden(model, tokens)[-1]
        assert_close(found[name], torch.nn.functional.normalize(expected, dim=0))
        assert_close(short[name], torch.nn.functional.normalize(expected[:8], dim=0))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2"])
def test_heads_of_labels_equal_transformers(tmp_path: Path, family: str) -> None:
    num_labels = 1 if family == "Llama" else 3  # a reward model, and classifiers
    model = make_decoder(tmp_path, f"{family}ForSequenceClassification", num_labels=num_labels)
    texts = random_texts(9, 30, 2)
    with engine(tmp_path) as core:
        rewards = pool_all(core, texts, PoolingParams(task="reward"))
        classes = pool_all(core, texts, PoolingParams(task="classify"))
    for name, tokens in texts.items():
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        assert_close(rewards[name], logits)
        assert_close(classes[name], logits.sigmoid() if num_labels == 1 else logits.softmax(0))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral", "Gemma2"])
def test_a_model_without_a_head_embeds(tmp_path: Path, family: str) -> None:
    make_decoder(tmp_path, f"{family}Model")
    model = transformers.AutoModel.from_pretrained(tmp_path)
    texts = random_texts(5, 17)
    with engine(tmp_path) as core:
        found = pool_all(core, texts, RAW)
    for name, tokens in texts.items():
        assert_close(found[name], last_hidden(model, tokens)[-1])


@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=7),
        dict(max_num_batched_tokens=64, long_prefill_token_threshold=5),
        dict(max_num_batched_tokens=7, num_blocks=18, async_scheduling=True),
        dict(max_num_batched_tokens=7, num_blocks=18, enable_prefix_caching=False),
    ],
    ids=["budget", "threshold", "few blocks, async", "few blocks, no cache"],
)
def test_chunks_equal_the_whole(tmp_path: Path, pooling: str, options: dict[str, Any]) -> None:
    model = make_decoder(tmp_path, "LlamaForCausalLM")
    texts = random_texts(44, 1, 20, 40, 3, 33, common=9)
    with engine(tmp_path, runner="pooling", pooling=pooling, **options) as core:
        found = pool_all(core, texts, RAW)
    for name, tokens in texts.items():
        assert_close(found[name], POOLED[pooling](last_hidden(model, tokens)))


def test_preemption_changes_no_mean(tmp_path: Path) -> None:
    """A request that is better placed takes the blocks of one whose sum has begun."""
    model = make_decoder(tmp_path, "LlamaForCausalLM")
    texts = random_texts(50, 50)
    options = dict(runner="pooling", pooling="mean", num_blocks=18, max_num_batched_tokens=8)
    with engine(tmp_path, **options, scheduling_policy="priority") as core:
        add_text(core, "text-0", texts["text-0"], RAW)
        for _ in range(3):
            core.step()
        add_text(core, "text-1", texts["text-1"], RAW, priority=-1)
        found = pool_all(core, {}, RAW)
        assert core.stats().preemptions == 1
    for name, tokens in texts.items():
        assert_close(found[name], last_hidden(model, tokens).mean(0))


@pytest.mark.parametrize(("pooling", "num_hits"), [("last", 8), ("mean", 0)])
def test_only_the_last_state_can_do_without_those_before_it(tmp_path: Path, pooling: str, num_hits: int) -> None:
    model = make_decoder(tmp_path, "LlamaForCausalLM")
    texts = random_texts(3, 5, common=10)
    with engine(tmp_path, runner="pooling", pooling=pooling) as core:
        for name, tokens in texts.items():
            found = pool_all(core, {name: tokens}, RAW)
            assert_close(found[name], POOLED[pooling](last_hidden(model, tokens)))
        assert core.stats().prefix_hit_tokens == num_hits


def test_a_text_may_fill_the_whole_context(tmp_path: Path) -> None:
    """No room is kept for an answer, and the last chunk comes like the others."""
    model = make_decoder(tmp_path, "LlamaForCausalLM")
    texts = random_texts(64)
    with engine(tmp_path, runner="pooling", max_num_batched_tokens=30) as core:
        found = pool_all(core, texts, RAW)
    assert_close(found["text-0"], last_hidden(model, texts["text-0"])[-1])


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    make_decoder(tmp_path, "Qwen3ForSequenceClassification", num_labels=2)
    texts = random_texts(12, 30)
    with engine(tmp_path) as core:
        alone = pool_all(core, texts, PoolingParams(task="reward"))
    with engine(tmp_path, tensor_parallel_size=2, num_threads=2) as core:
        divided = pool_all(core, texts, PoolingParams(task="reward"))
    for name in texts:
        assert_close(divided[name], torch.tensor(alone[name]))


@pytest.mark.parametrize(
    ("class_name", "options", "named"),
    [
        ("LlamaForCausalLM", dict(runner="encode"), "runner=encode"),
        ("LlamaForCausalLM", dict(runner="pooling", pooling="max"), "pooling=max"),
        ("LlamaForCausalLM", dict(pooling="mean"), "runner=pooling"),
        ("LlamaForSequenceClassification", dict(runner="generate"), "generates no tokens"),
        ("LlamaForSequenceClassification", dict(pooling="mean"), "trained on last"),
        ("LlamaModel", dict(cudagraph_mode="FULL_DECODE_ONLY"), "cudagraph_mode"),
        ("LlamaModel", dict(enable_lora=True), "enable_lora"),
    ],
)
def test_options_that_cannot_hold_are_named(
    tmp_path: Path, class_name: str, options: dict[str, Any], named: str
) -> None:
    architecture = {"architectures": [class_name], "num_labels": 2}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | architecture))
    with pytest.raises(ConfigError, match=named):
        build_engine(EngineArgs(str(tmp_path), device="cpu", **options))
