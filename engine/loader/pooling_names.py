"""Checkpoint names of models that pool → parameters. Pure text: no tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from inferd.engine.loader.names import HEAD, MakeNames, NameMap, Stage, Target
from inferd.engine.model_encoder import ENCODERS

_BASES = ("bert.", "roberta.")  # what a model with a head puts before the names of the model without
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_POOLER = "pooler."  # is in many checkpoints of models that have no labels
_PRETRAINING = ("cls.", "lm_head.")  # heads that only training needs
_LAYER = re.compile(r"encoder\.layer\.(\d{1,9})\.(.+)\.(weight|bias)")
_OLD_NORM_NAMES = {"gamma": "weight", "beta": "bias"}
_LAYER_PARTS: Mapping[str, tuple[str, str | None]] = {
    "attention.self.query": ("qkv_proj", "q"),
    "attention.self.key": ("qkv_proj", "k"),
    "attention.self.value": ("qkv_proj", "v"),
    "attention.output.dense": ("o_proj", None),
    "attention.output.LayerNorm": ("attention_norm", None),
    "intermediate.dense": ("up_proj", None),
    "output.dense": ("down_proj", None),
    "output.LayerNorm": ("output_norm", None),
}
_PARTS: Mapping[str, str] = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
    "embeddings.LayerNorm": "embeddings.norm",
}


class EncoderNames:
    """Of BERT, with and without a head of labels."""

    head: Mapping[str, str] = {"pooler.dense": "head.dense", "classifier": "head.out_proj"}

    def __init__(self, slots: Iterable[Target], stage: Stage) -> None:
        self._slots = frozenset(slots)
        self._parts = {**_PARTS, **self.head}

    def targets(self, name: str) -> tuple[Target, ...] | None:
        name = _without_base(name)
        if name in _BUFFERS or name.startswith(_PRETRAINING):
            return ()
        target = self._target(name)
        if target in self._slots:
            return (target,)
        return () if name.startswith(_POOLER) else None

    def checkpoint_name(self, slot: Target) -> str:
        """Without what a model with a head puts before it."""
        module, _, kind = slot.parameter.rpartition(".")
        if (layer := re.fullmatch(r"layers\.(\d+)\.(\w+)", module)) is not None:
            part = next(part for part, made in _LAYER_PARTS.items() if made == (layer[2], slot.shard))
            return f"encoder.layer.{layer[1]}.{part}.{kind}"
        return f"{next(part for part, made in self._parts.items() if made == module)}.{kind}"

    def _target(self, name: str) -> Target | None:
        module, _, kind = name.rpartition(".")
        kind = _OLD_NORM_NAMES.get(kind, kind)
        if (layer := _LAYER.fullmatch(f"{module}.{kind}")) is not None:
            made, shard = _LAYER_PARTS.get(layer[2], (None, None))
            return None if made is None else Target(f"layers.{layer[1]}.{made}.{kind}", shard)
        return Target(f"{self._parts[module]}.{kind}") if module in self._parts else None


class RobertaNames(EncoderNames):
    """Of RoBERTa and XLM-RoBERTa."""

    head: Mapping[str, str] = {"classifier.dense": "head.dense", "classifier.out_proj": "head.out_proj"}


class PooledDecoderNames:
    """Of a decoder whose head of logits is not used, and whose layers may stand without a model around them."""

    def __init__(self, slots: Iterable[Target], stage: Stage) -> None:
        self._names = NameMap(slots, stage)

    def targets(self, name: str) -> tuple[Target, ...] | None:
        if name == HEAD:
            return ()
        return self._names.targets(name if name.startswith(("model.", "score.")) else f"model.{name}")

    def checkpoint_name(self, slot: Target) -> str:
        return self._names.checkpoint_name(slot)


def names_for(architecture: str) -> MakeNames:
    if architecture not in ENCODERS:
        return PooledDecoderNames
    return EncoderNames if architecture.startswith("Bert") else RobertaNames


def _without_base(name: str) -> str:
    return next((name.removeprefix(base) for base in _BASES if name.startswith(base)), name)
