"""The causal language model around a decoder stack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from inferd.engine.config import ModelConfig
from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.layers.embedding import ParallelLMHead
from inferd.engine.layers.weights import WeightLayer
from inferd.engine.models.base import BuildContext
from inferd.engine.models.blocks import DecoderStack, DecoderTraits


class DecoderForCausalLM(nn.Module, ABC):
    """Implements `CausalLM`; an architecture says its traits. Call `forward` by name: Module's `__call__` is slow."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.model = DecoderStack(config, self.traits(config), context)
        self._logit_softcap = config.logit_softcap
        if self.model.is_last:
            is_tied = config.tie_embeddings and self.model.is_first
            tied = self.model.embed_tokens.table if is_tied else None
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, context, tied)

    @staticmethod
    @abstractmethod
    def traits(config: ModelConfig) -> DecoderTraits: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        return self.model.forward(token_ids, positions, inputs_embeds, hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head.forward(hidden)
        if self._logit_softcap is not None:
            logits = logits.div_(self._logit_softcap).tanh_().mul_(self._logit_softcap)
        return logits

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
