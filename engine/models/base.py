"""What a model is built from, and what the worker may ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.layers.target import BuildTarget
from inferd.engine.layers.weights import WeightLayer


@dataclass(frozen=True)
class BuildContext(BuildTarget):
    """Adds what only a model needs: its own layers of the whole (a pipeline stage), and the positions it is ready for
    before `reserve_positions` asks for more."""

    layers: range
    num_positions: int


class Model(Protocol):
    """Parameters are uninitialised after construction; `loader.base` fills and prepares them."""

    def kv_specs(self, block_size: int) -> dict[str, KVSpec]:
        """Layer name → what that layer keeps per token, on this rank."""
        ...

    def reserve_positions(self, num_positions: int) -> None:
        """Make positions [0, num_positions) usable. Memory that a captured step reads may move: call it before."""
        ...

    def weight_layers(self) -> Iterator[tuple[str, WeightLayer]]:
        """Dotted name and layer of everything that has parameters."""
        ...

    def prepare(self) -> None:
        """Called once after the weights are in place: every linear packs itself through `ops.make_linear`."""
        ...


class CausalLM(Model, Protocol):
    """A decoder with a head of logits."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """token_ids[t] i64, positions[t] i64 -> hidden[t, h], inside `attention.context.forward_context`.

        `inputs_embeds[t, h]` replaces the embedding of the ids. `hidden[t, h]` is the previous stage's result: required
        from every stage but the first. The last stage's result is normed, ready for `compute_logits`.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden[m, h] -> [m, vocab] in the model's dtype; last stage only."""
        ...


class PoolingModel(Model, Protocol):
    """A model whose hidden states are what is wanted of it."""

    def forward(self, token_ids: Tensor, positions: Tensor, *, token_types: Tensor | None = None) -> Tensor:
        """token_ids[t] i64, positions[t] i64 -> normed hidden[t, h], inside `attention.context.forward_context`.

        `token_types[t]` i64 say which text of a pair each token is of; None: all are of the first.
        """
        ...

    def classify(self, pooled: Tensor) -> Tensor:
        """pooled[m, h] f32 -> [m, labels] f32, before any activation; only of a model with a head."""
        ...
