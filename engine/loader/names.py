"""Checkpoint names → parameters. Pure text: no tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "gate"),
    "up_proj": ("gate_up_proj", "up"),
}
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
DERIVED = (".rotary_emb.inv_freq",)  # buffers of old checkpoints that follow from the configuration

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes: a parameter, and its shard when the parameter is fused."""

    parameter: str
    shard: str | None = None


@dataclass(frozen=True)
class Stage:
    """What part of the model this process holds."""

    layers: range
    num_layers: int
    tie_embeddings: bool

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers


class Names(Protocol):
    """Which parameters the tensors of a checkpoint fill."""

    def targets(self, name: str) -> tuple[Target, ...] | None:
        """Every slot that tensor `name` fills: () for one that is rightly skipped, None for one that is unexpected."""
        ...

    def checkpoint_name(self, slot: Target) -> str:
        """The checkpoint tensor that fills `slot`."""
        ...


MakeNames = Callable[[Iterable[Target], Stage], Names]  # from the places to fill


class NameMap:
    """Maps the checkpoint of a whole model to the parameters of one stage.

    `slots` are the places to fill. A tied head follows the embedding: a copy of the head in the checkpoint is skipped,
    and a last stage that has no embedding fills its head from the embedding's tensor.
    """

    def __init__(self, slots: Iterable[Target], stage: Stage) -> None:
        self._slots = frozenset(slots)
        self._stage = stage

    def targets(self, name: str) -> tuple[Target, ...] | None:
        """Every slot that tensor `name` fills: () for one that is rightly skipped, None for one that is unexpected."""
        if name.endswith(DERIVED) or self._is_skipped(name):
            return ()
        candidates = [_parameter(name)]
        if name == EMBEDDING and self._stage.tie_embeddings:
            candidates.append(Target(HEAD))
        return tuple(target for target in candidates if target in self._slots) or None

    def checkpoint_name(self, slot: Target) -> str:
        """The checkpoint tensor that fills `slot`."""
        if slot.parameter == HEAD and self._stage.tie_embeddings:
            return EMBEDDING
        for part, (fused, shard) in FUSED.items():
            if shard == slot.shard and f".{fused}." in slot.parameter:
                return slot.parameter.replace(f".{fused}.", f".{part}.")
        return slot.parameter

    def _is_skipped(self, name: str) -> bool:
        stage = self._stage
        layer = _LAYER.match(name)
        if layer is not None:
            index = int(layer[1])
            return index < stage.num_layers and index not in stage.layers
        if name == HEAD:
            return stage.tie_embeddings or not stage.is_last
        if name == FINAL_NORM:
            return not stage.is_last
        return name == EMBEDDING and not stage.is_first and not (stage.is_last and stage.tie_embeddings)


def _parameter(name: str) -> Target:
    head, _, kind = name.rpartition(".")
    prefix, _, module = head.rpartition(".")
    if module in FUSED:
        fused, shard = FUSED[module]
        return Target(f"{prefix}.{fused}.{kind}", shard)
    return Target(name)
