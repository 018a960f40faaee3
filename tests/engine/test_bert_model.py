"""BERT and RoBERTa through the whole engine, against transformers on the same random weights, in float32."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
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
from inferd.engine.errors import LoadError
from inferd.engine.model_config import read_model_config
from inferd.engine.pooling.params import PoolingParams
from inferd.engine.testing.encoder_folder import CONFIG, add_sentence_files, make_encoder_folder
from inferd.engine.testing.pooling_jobs import pool_all

RAW = PoolingParams(task="embed", normalize=False)
ROBERTA = dict(type_vocab_size=1, pad_token_id=1)
EMBEDDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert-tanh-form": ("BertModel", dict(hidden_act="gelu_new")),
    "bert-relu": ("BertModel", dict(hidden_act="relu", num_attention_heads=6)),
    "masked-bert": ("BertForMaskedLM", {}),
    "roberta": ("RobertaModel", ROBERTA),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA | dict(pad_token_id=3)),
}


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[EngineCore]:
    fixed: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_threads=1)
    core, _ = build_engine(EngineArgs(str(folder), **(fixed | options)))
    try:
        yield core
    finally:
        core.shutdown()


def random_texts(*lengths: int) -> dict[str, list[int]]:
    """Without the padding ids of any of the models: transformers hides those tokens."""
    source = random.Random(5)
    return {f"text-{index}": [source.randrange(5, 70) for _ in range(n)] for index, n in enumerate(lengths)}


@torch.no_grad()
def hidden_states(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    hidden: torch.Tensor = model(torch.tensor([tokens])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("case", EMBEDDERS)
def test_equals_transformers(tmp_path: Path, case: str) -> None:
    """Texts of all lengths in one batch, up to the longest that the model knows."""
    architecture, config = EMBEDDERS[case]
    folder = make_encoder_folder(tmp_path / "model", architecture, **config)
    texts = random_texts(1, 62, 7, 7, 19, 2)
    with engine(folder) as core:
        found = pool_all(core, texts, RAW)
    for name, tokens in texts.items():
        expected = hidden_states(folder, tokens).mean(0)
        torch.testing.assert_close(torch.tensor(found[name]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("mode", "index"), [("cls_token", 0), ("lasttoken", -1)])
def test_pools_as_the_files_say(tmp_path: Path, mode: str, index: int) -> None:
    folder = add_sentence_files(make_encoder_folder(tmp_path / "model"), mode)
    texts = random_texts(9, 4)
    with engine(folder) as core:
        found = pool_all(core, texts, PoolingParams())
    for name, tokens in texts.items():
        expected = torch.nn.functional.normalize(hidden_states(folder, tokens)[index], dim=0)
        torch.testing.assert_close(torch.tensor(found[name]), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def label_logits(folder: Path, tokens: Sequence[int], types: Sequence[int] | None) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    logits: torch.Tensor = model(torch.tensor([tokens]), **given).logits[0]
    return logits


ACTIVATED: dict[str, Any] = {
    "softmax": lambda logits: logits.softmax(0),
    "sigmoid": lambda logits: logits.sigmoid(),
    "identity": lambda logits: logits,
}


@pytest.mark.parametrize(
    ("architecture", "num_labels", "config", "activation"),
    [
        ("BertForSequenceClassification", 3, {}, "softmax"),
        ("BertForSequenceClassification", 3, dict(problem_type="multi_label_classification"), "sigmoid"),
        ("BertForSequenceClassification", 1, {}, "sigmoid"),
        ("BertForSequenceClassification", 1, dict(problem_type="regression"), "identity"),
        (
            "BertForSequenceClassification",
            1,
            dict(sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}),
            "identity",
        ),
        ("RobertaForSequenceClassification", 2, ROBERTA, "softmax"),
        ("XLMRobertaForSequenceClassification", 1, ROBERTA, "sigmoid"),
    ],
)
def test_heads_equal_transformers(
    tmp_path: Path, architecture: str, num_labels: int, config: dict[str, Any], activation: str
) -> None:
    folder = make_encoder_folder(tmp_path / "model", architecture, num_labels=num_labels, **config)
    texts = random_texts(11, 3, 30)
    types = {"text-0": [0] * 4 + [1] * 7, "text-2": [0] * 29 + [1]} if architecture.startswith("Bert") else {}
    with engine(folder) as core:
        classes = pool_all(core, texts, PoolingParams(task="classify"), types)
        rewards = pool_all(core, texts, PoolingParams(task="reward"), types)
        activated = pool_all(core, texts, PoolingParams(task="reward", activation=True), types)
    for name, tokens in texts.items():
        logits = label_logits(folder, tokens, types.get(name))
        torch.testing.assert_close(torch.tensor(rewards[name]), logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(classes[name]), ACTIVATED[activation](logits), atol=1e-5, rtol=1e-5)
    assert activated == classes


def test_token_types_matter(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    texts = random_texts(6)
    with engine(folder) as core:
        without = pool_all(core, texts, PoolingParams(task="score"))
        with_types = pool_all(core, texts, PoolingParams(task="score"), {"text-0": [0, 0, 0, 1, 1, 1]})
    assert abs(without["text-0"][0] - with_types["text-0"][0]) > 1e-3


def test_batch_equals_alone(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "model")
    texts = random_texts(*range(1, 41))
    with engine(folder, max_num_batched_tokens=100, max_num_seqs=7) as core:
        together = pool_all(core, texts, RAW)
        alone = {name: pool_all(core, {name: tokens}, RAW)[name] for name, tokens in texts.items()}
    for name in texts:
        torch.testing.assert_close(torch.tensor(together[name]), torch.tensor(alone[name]), atol=1e-5, rtol=1e-5)
    assert len({tuple(vector) for vector in together.values()}) == len(texts)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_two_ranks_equal_one(tmp_path: Path, async_scheduling: bool) -> None:
    folder = make_encoder_folder(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    texts, params = random_texts(17, 1, 33, 8), PoolingParams(task="classify", activation=False)
    types = {"text-2": [0] * 20 + [1] * 13}
    with engine(folder) as core:
        alone = pool_all(core, texts, params, types)
    with engine(folder, tensor_parallel_size=2, num_threads=2, async_scheduling=async_scheduling) as core:
        divided = pool_all(core, texts, params, types)
    for name in texts:
        torch.testing.assert_close(torch.tensor(divided[name]), torch.tensor(alone[name]), atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "model")
    texts = random_texts(24)
    with engine(folder) as core:
        exact = torch.tensor(pool_all(core, texts, PoolingParams())["text-0"])
    with engine(folder, dtype="bfloat16") as core:
        rounded = torch.tensor(pool_all(core, texts, PoolingParams())["text-0"])
    assert 0.99 < float(exact @ rounded) < 1.0 - 1e-7


def test_old_names_and_buffers_are_read(tmp_path: Path) -> None:
    """Norms were called gamma and beta once, positions were saved, and training left heads behind."""
    folder = make_encoder_folder(tmp_path / "model")
    texts = random_texts(5)
    with engine(folder) as core:
        expected = pool_all(core, texts, RAW)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in tensors.items()
    }
    extra = {
        "bert.embeddings.position_ids": torch.arange(66)[None],
        "bert.pooler.dense.weight": torch.zeros(48, 48),
        "cls.predictions.bias": torch.zeros(71),
    }
    save_file(renamed | extra, folder / "model.safetensors")
    with engine(folder) as core:
        assert pool_all(core, texts, RAW) == expected


def test_a_wrong_checkpoint_is_told_by_its_tensors(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "model", "RobertaForSequenceClassification", num_labels=2, **ROBERTA)
    tensors = load_file(folder / "model.safetensors")
    missing = {name: t for name, t in tensors.items() if "query.weight" not in name and "classifier.dense" not in name}
    save_file(missing, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"classifier\.dense\.bias.*encoder\.layer\.0\.attention\.self\.query\.weight"):
        build_engine(EngineArgs(str(folder), device="cpu"))
    save_file(
        tensors | {"roberta.encoder.layer.0.crossattention.self.query.weight": torch.ones(1)},
        folder / "model.safetensors",
    )
    with pytest.raises(LoadError, match="crossattention"):
        build_engine(EngineArgs(str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(position_embedding_type="relative_key"), "position_embedding_type"),
        (dict(is_decoder=True), "is_decoder"),
        (dict(hidden_act="swish"), "hidden_act"),
        (dict(num_attention_heads=5), "hidden_size"),
        (dict(architectures=["MPNetModel"]), "MPNetModel"),
        (dict(auto_map={"AutoModel": "modeling.Foo"}), "auto_map"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertModel"]} | change))
    with pytest.raises(LoadError, match=named):
        read_model_config(tmp_path)
