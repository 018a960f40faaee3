"""A decoder whose last hidden states are pooled: an embedder, or with a head a classifier or reward model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from inferd.engine.config import ModelConfig
from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.layers.head import LabelHead
from inferd.engine.layers.weights import WeightLayer
from inferd.engine.models.base import BuildContext
from inferd.engine.models.blocks import DecoderStack, DecoderTraits


class DecoderForPooling(nn.Module):
    """Implements `PoolingModel` over the layers of a model that generates; `traits` are that one's."""

    def __init__(
        self, config: ModelConfig, context: BuildContext, *, traits: Callable[[ModelConfig], DecoderTraits]
    ) -> None:
        super().__init__()
        self.model = DecoderStack(config, traits(config), context)
        labels = config.pooler.labels if config.pooler is not None else ()
        self.score = LabelHead(config.hidden_size, len(labels), False, context) if labels else None

    def forward(self, token_ids: Tensor, positions: Tensor, *, token_types: Tensor | None = None) -> Tensor:
        return self.model.forward(token_ids, positions, None, None)

    def classify(self, pooled: Tensor) -> Tensor:
        if self.score is None:
            raise RuntimeError("labels were asked of a model without a head")
        return self.score.forward(pooled)

    def kv_specs(self, block_size: int) -> dict[str, KVSpec]:
        return {attention.name: attention.kv_spec(block_size) for attention in self.model.attentions}

    def reserve_positions(self, num_positions: int) -> None:
        for table in self.model.rope_tables:
            table.reserve(num_positions)

    def weight_layers(self) -> Iterator[tuple[str, WeightLayer]]:
        for name, module in self.named_modules():
            if isinstance(module, WeightLayer):
                yield name, module

    def prepare(self) -> None:
        for _, layer in self.weight_layers():
            layer.prepare()
