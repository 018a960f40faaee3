"""What the files of a model folder say about pooling, and what is refused in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.config import EngineArgs, EngineConfig
from inferd.engine.errors import ConfigError, LoadError
from inferd.engine.model_config import read_model_config
from inferd.engine.pooling.config import PoolerConfig
from inferd.engine.resolve import Hardware, resolve
from inferd.engine.testing.encoder_folder import CONFIG, add_sentence_files

MACHINE = Hardware(num_cpus=2, has_cuda=False, fast_bfloat16=True)


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "config.json", {**CONFIG, "architectures": ["BertModel"]})
    return tmp_path


def pooler_of(folder: Path, **config: Any) -> PoolerConfig:
    if config:
        write(folder, "config.json", {**CONFIG, **config})
    pooler = read_model_config(folder).pooler
    assert pooler is not None
    return pooler


def settle(folder: Path, **options: Any) -> EngineConfig:
    return resolve(EngineArgs(str(folder), **options), MACHINE)


def test_an_encoder_that_says_nothing_gives_normalised_means(folder: Path) -> None:
    assert pooler_of(folder) == PoolerConfig("mean", ("embed",), normalize=True)


@pytest.mark.parametrize(("mode", "pooling"), [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last")])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers_files(folder: Path, mode: str, pooling: str, normalize: bool) -> None:
    add_sentence_files(folder, mode, normalize=normalize, max_seq_length=24, do_lower_case=True)
    pooler = pooler_of(folder)
    assert (pooler.pooling, pooler.normalize) == (pooling, normalize)
    assert (pooler.max_tokens, pooler.lower_case) == (24, True)


def test_the_newer_way_to_write_it(folder: Path) -> None:
    add_sentence_files(folder)
    write(folder, "1_Pooling/config.json", {"embedding_dimension": 48, "pooling_mode": "cls"})
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.sentence.modules.Pooling"},
    ]
    write(folder, "modules.json", modules)
    assert pooler_of(folder).pooling == "cls"


def test_the_longest_text_is_what_its_authors_say(folder: Path) -> None:
    add_sentence_files(folder, max_seq_length=24)
    assert settle(folder).scheduler.max_model_len == 24
    assert settle(folder, max_model_len=60).scheduler.max_model_len == 60
    assert settle(folder, max_model_len="auto").scheduler.max_model_len == 24
    with pytest.raises(ConfigError, match="66 positions"):
        settle(folder, max_model_len=67)


@pytest.mark.parametrize(
    ("file", "value", "named"),
    [
        ("modules.json", [], "(none)"),
        ("modules.json", {"type": "x"}, "modules.json"),
        ("modules.json", [{"type": "own.Transformer"}], "code of its own"),
        ("modules.json", [{"type": "sentence_transformers.models.Transformer", "path": "0_T"}] * 2, "Transformer"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "and"),
        ("1_Pooling/config.json", {}, "none is not supported"),
        ("1_Pooling/config.json", [1], "cannot be read"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length"),
        ("sentence_bert_config.json", {"do_lower_case": "yes"}, "do_lower_case"),
    ],
)
def test_what_is_not_supported_is_named(folder: Path, file: str, value: Any, named: str) -> None:
    add_sentence_files(folder, max_seq_length=24)
    write(folder, file, value)
    with pytest.raises(LoadError, match=named.replace("(", r"\(").replace(")", r"\)")):
        read_model_config(folder)


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "a/b", ""])
def test_a_module_is_looked_for_in_this_folder_only(folder: Path, path: str) -> None:
    add_sentence_files(folder)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    write(folder, "modules.json", modules)
    with pytest.raises(LoadError, match="no folder beside this file"):
        read_model_config(folder)


def test_a_module_that_is_missing_is_named(folder: Path) -> None:
    add_sentence_files(folder)
    (folder / "1_Pooling/config.json").unlink()
    with pytest.raises(LoadError, match=r"1_Pooling/config\.json is missing"):
        read_model_config(folder)
    modules = json.loads((folder / "modules.json").read_text())
    write(folder, "modules.json", [*modules[:2], {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
    with pytest.raises(LoadError, match="Transformer, Pooling, Dense are not supported"):
        read_model_config(folder)


CLASSIFIER = dict(architectures=["BertForSequenceClassification"])


@pytest.mark.parametrize(
    ("config", "labels", "activation", "tasks"),
    [
        (dict(), ("LABEL_0", "LABEL_1"), "softmax", ("classify", "reward")),
        (dict(num_labels=1), ("LABEL_0",), "sigmoid", ("classify", "reward", "score")),
        (dict(id2label={"1": "bad", "0": "good"}), ("good", "bad"), "softmax", ("classify", "reward")),
        (
            dict(id2label={"0": "x"}, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity"),
            ("x",),
            "identity",
            ("classify", "reward", "score"),
        ),
    ],
)
def test_heads(folder: Path, config: dict[str, Any], labels: Any, activation: str, tasks: Any) -> None:
    pooler = pooler_of(folder, **CLASSIFIER, **config)
    assert (pooler.labels, pooler.activation, pooler.tasks) == (labels, activation, tasks)
    assert pooler.pooling == "cls"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (dict(id2label={"0": "x", "2": "y"}), "id2label"),
        (dict(id2label={}), "id2label"),
        (dict(num_labels=10**7), "num_labels"),
        (dict(sentence_transformers={"activation_fn": "torch.nn.Tanh"}), "activation_fn"),
    ],
)
def test_heads_that_are_wrong_are_named(folder: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        pooler_of(folder, **CLASSIFIER, **config)


def test_matryoshka(folder: Path) -> None:
    add_sentence_files(folder)
    assert pooler_of(folder).matryoshka_sizes is None
    base = dict(architectures=["BertModel"])
    assert pooler_of(folder, **base, is_matryoshka=True).matryoshka_sizes == ()
    assert pooler_of(folder, **base, matryoshka_dimensions=[8, 16]).matryoshka_sizes == (8, 16)
    with pytest.raises(LoadError, match="matryoshka_dimensions"):
        pooler_of(folder, **base, matryoshka_dimensions=[0])


def test_what_follows_for_the_engine(folder: Path) -> None:
    """Texts whole in one step, nothing cached, float32 as the checkpoint has it."""
    config = settle(folder)
    assert (config.dtype, config.cache.enable_prefix_caching) == ("float32", False)
    assert not config.scheduler.enable_chunked_prefill
    said = " ".join(config.decisions)
    assert "runner=pooling: mean" in said
    assert "enable_prefix_caching=False: mean pooling" in said


def test_the_budget_holds_the_longest_text(folder: Path) -> None:
    write(folder, "config.json", {**CONFIG, "architectures": ["BertModel"], "max_position_embeddings": 5000})
    assert settle(folder).scheduler.max_num_batched_tokens == 5000
    assert settle(folder, max_model_len=100).scheduler.max_num_batched_tokens == 2048
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=99 is below max_model_len=100"):
        settle(folder, max_model_len=100, max_num_batched_tokens=99)
    with pytest.raises(ConfigError, match="long_prefill_token_threshold=8"):
        settle(folder, long_prefill_token_threshold=8)
