"""A tiny encoder with random weights, in the files that real ones have: text to vectors without a download."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

SPREAD = 0.2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONFIG: Mapping[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 48,
    "intermediate_size": 68,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_MODULES = ("Transformer", "Pooling", "Normalize")


def make_encoder_folder(
    path: Path, architecture: str = "BertModel", *, num_labels: int = 0, seed: int = 0, **config: Any
) -> Path:
    """`config.json`, float32 weights, and a tokenizer of letters that adds [CLS] and [SEP]; `config` overrides keys.

    BERT, RoBERTa and XLM-RoBERTa. `num_labels`: of the head of a `…ForSequenceClassification`. Returns `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    kind = architecture.removesuffix("Model").removesuffix("ForSequenceClassification").removesuffix("ForMaskedLM")
    model_type = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "xlm-roberta"}[kind]
    values = {**CONFIG, "architectures": [architecture], "model_type": model_type, "torch_dtype": "float32", **config}
    if num_labels:
        values["id2label"] = {str(index): f"label {index}" for index in range(num_labels)}
    _write(path / "config.json", values)
    _write(path / "tokenizer_config.json", {"model_max_length": 64})
    letter_tokenizer().save(str(path / "tokenizer.json"))
    generator = torch.Generator().manual_seed(seed)
    base = "" if architecture.endswith("Model") else f"{'bert' if kind == 'Bert' else 'roberta'}."
    shapes = {f"{base}{name}": shape for name, shape in _body_shapes(values)}
    if num_labels:
        shapes |= _head_shapes(values["hidden_size"], num_labels, base)
    save_file({name: _random(name, shape, generator) for name, shape in shapes.items()}, path / "model.safetensors")
    return path


def add_sentence_files(path: Path, mode: str = "mean_tokens", *, normalize: bool = True, **text: Any) -> Path:
    """The files of sentence-transformers; `text` is for `sentence_bert_config.json`. Returns `path`."""
    folders = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (folder, kind) in enumerate(zip(folders, _MODULES, strict=True))
    ]
    _write(path / "modules.json", modules if normalize else modules[:2])
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    size = json.loads((path / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": size} | {f"pooling_mode_{name}": name == mode for name in modes}
    _write(path / "1_Pooling" / "config.json", pooling)
    if text:
        _write(path / "sentence_bert_config.json", {"max_seq_length": None, "do_lower_case": False} | text)
    return path


def letter_tokenizer() -> Tokenizer:
    """WordPiece over single letters, saved as some are: to cut and to fill up texts for batches of its owner's."""
    tokens = [*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIALS)
    ends = [("[CLS]", tokens.index("[CLS]")), ("[SEP]", tokens.index("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding(length=16)
    return tokenizer


def _body_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (config["vocab_size"], hidden)
    yield "embeddings.position_embeddings.weight", (config["max_position_embeddings"], hidden)
    yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], hidden)
    yield from _pair("embeddings.LayerNorm", hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            yield from _pair(f"{layer}.attention.{name}", hidden, hidden)
        yield from _pair(f"{layer}.attention.output.LayerNorm", hidden)
        yield from _pair(f"{layer}.intermediate.dense", inner, hidden)
        yield from _pair(f"{layer}.output.dense", hidden, inner)
        yield from _pair(f"{layer}.output.LayerNorm", hidden)


def _head_shapes(hidden: int, num_labels: int, base: str) -> dict[str, tuple[int, ...]]:
    dense, out = ("bert.pooler.dense", "classifier") if base == "bert." else ("classifier.dense", "classifier.out_proj")
    return dict([*_pair(dense, hidden, hidden), *_pair(out, num_labels, hidden)])


def _pair(module: str, num_outputs: int, *num_inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{module}.weight", (num_outputs, *num_inputs)
    yield f"{module}.bias", (num_outputs,)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator) * SPREAD
    return noise + 1.0 if name.endswith("LayerNorm.weight") else noise


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
