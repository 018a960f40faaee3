"""Which files of a repository or folder make up the model. Pure: names in, names out.

Only names that are known beforehand are taken, so nothing that could run and no path of a stranger's making is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inferd.appliance.library.errors import InvalidSource, SourceNotFound, UnsupportedModel
from inferd.appliance.library.records import WeightFormat

CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "modules.json",  # this and those below: what sentence-transformers says about an embedder
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_xlm-roberta_config.json",
    "1_Pooling/config.json",
)
NESTED_FILES = tuple(name for name in CONFIG_FILES if "/" in name)
MAX_CONFIG_BYTES = 64 << 20  # of one of these files, which are read whole
REQUIRED_FILES = ("config.json", "tokenizer.json")
SINGLE_WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
GGUF_NAME = "model.gguf"  # what every GGUF file is called once it is ours
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")  # what `inferd convert` rewrites

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_QUANT = re.compile(r"(?:^|[._/-])(I?Q\d(?:_[0-9A-Za-z]+)*|TQ\d_\d|MXFP4|BF16|F16|F32|FP16|FP32)\.gguf$", re.IGNORECASE)


@dataclass(frozen=True)
class Selection:
    """`config`: small files, to be fetched and judged first. `weights`: the rest."""

    format: WeightFormat
    config: tuple[str, ...]
    weights: tuple[str, ...]


def select_files(names: Sequence[str], choice: str | None, where: str) -> Selection:
    """`choice`: a GGUF file's name or a quantisation. Raises `InvalidSource` where a choice is missing or not clear,
    `SourceNotFound` where it names nothing, and `UnsupportedModel` where there is nothing to serve.
    """
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf"))
    if choice is not None:
        return _gguf(_chosen(ggufs, choice, where), where)
    if SINGLE_WEIGHTS in names or WEIGHTS_INDEX in names:
        return _safetensors(names, where)
    models = [name for name in ggufs if not name.rpartition("/")[2].lower().startswith("mmproj")]
    if len(models) == 1:
        return _gguf(models[0], where)
    if models:
        raise InvalidSource(f"{where} has {len(models)} GGUF files, name one after a colon: {', '.join(models)}")
    pickles = sorted(name for name in names if name.lower().endswith(PICKLE_SUFFIXES))
    if pickles:
        raise UnsupportedModel(
            f"{where} has its weights as {pickles[0]}, a format that can run code when it is read. Take a version with "
            "safetensors, or download it yourself, run `inferd convert FOLDER NEW_FOLDER` and pull NEW_FOLDER"
        )
    raise UnsupportedModel(f"{where} has no weights: neither {SINGLE_WEIGHTS}, nor {WEIGHTS_INDEX}, nor a GGUF file")


def quantisation_of(name: str) -> str | None:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` → `Q4_1`; None when the name does not say."""
    match = _QUANT.search(name)
    return match[1].upper() if match else None


def _safetensors(names: Sequence[str], where: str) -> Selection:
    for required in REQUIRED_FILES:
        if required not in names:
            raise UnsupportedModel(f"{where} has no {required}, which a model needs here")
    config = tuple(name for name in CONFIG_FILES if name in names)
    if SINGLE_WEIGHTS in names:
        return Selection("safetensors", config, (SINGLE_WEIGHTS,))
    shards = tuple(sorted(name for name in names if _SHARD.fullmatch(name)))
    return Selection("safetensors", (*config, WEIGHTS_INDEX), shards)


def _gguf(name: str, where: str) -> Selection:
    if _GGUF_PART.search(name):
        raise UnsupportedModel(f"{where}: {name} is one part of a split GGUF, which is not supported; join them first")
    return Selection("gguf", (), (name,))


def _chosen(ggufs: Sequence[str], choice: str, where: str) -> str:
    """An exact name wins; otherwise the one file of that quantisation."""
    if choice in ggufs:
        return choice
    pattern = re.compile(rf"(?:^|[._/-]){re.escape(choice)}(?:-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE)
    matches = [name for name in ggufs if pattern.search(name)]
    if not matches:
        raise SourceNotFound(f"{where} has no GGUF file {choice}; it has {', '.join(ggufs) or 'none at all'}")
    if len(matches) > 1 and not _GGUF_PART.search(matches[0]):
        raise InvalidSource(f"{where} has more than one file for {choice}, name one: {', '.join(matches)}")
    return matches[0]
