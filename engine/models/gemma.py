"""Gemma 2 and 3: norms on both sides of each sublayer, windows in most layers, scaled embeddings, capped scores."""

from __future__ import annotations

from torch import Tensor

from inferd.engine.config import ModelConfig
from inferd.engine.layers.norm import UnitOffsetRMSNorm
from inferd.engine.models.base import BuildContext
from inferd.engine.models.blocks import AttentionTraits, DecoderTraits, GatedMLP, Layer, LayerPlace, RopeAttention
from inferd.engine.models.decoder import DecoderForCausalLM


class GemmaDecoderLayer(Layer):
    """Attention and MLP, each between two norms: the second is taken before the result joins the stream."""

    def __init__(self, config: ModelConfig, traits: AttentionTraits, place: LayerPlace, context: BuildContext) -> None:
        super().__init__()
        norm = (config.hidden_size, config.norm_eps, context)
        self.input_layernorm = UnitOffsetRMSNorm(*norm)
        self.self_attn = RopeAttention(config, traits, place, context)
        self.post_attention_layernorm = UnitOffsetRMSNorm(*norm)
        self.pre_feedforward_layernorm = UnitOffsetRMSNorm(*norm)
        self.mlp = GatedMLP(config, context)
        self.post_feedforward_layernorm = UnitOffsetRMSNorm(*norm)
        self._first_norm, self._add_norm = self.input_layernorm.forward, self.input_layernorm.add
        self._attention, self._attention_norm = self.self_attn.forward, self.post_attention_layernorm.forward
        self._add_mlp_norm = self.pre_feedforward_layernorm.add
        self._mlp, self._last_norm = self.mlp.forward, self.post_feedforward_layernorm.forward

    def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        if residual is None:
            normed, residual = self._first_norm(hidden), hidden
        else:
            normed, residual = self._add_norm(hidden, residual)
        attended = self._attention_norm(self._attention(normed, positions))
        normed, residual = self._add_mlp_norm(attended, residual)
        return self._last_norm(self._mlp(normed)), residual


class Gemma2ForCausalLM(DecoderForCausalLM):
    @staticmethod
    def traits(config: ModelConfig) -> DecoderTraits:
        return DecoderTraits(
            AttentionTraits(config.attention_bias, config.output_bias),
            layer=GemmaDecoderLayer,
            norm=UnitOffsetRMSNorm,
            embedding_scale=config.hidden_size**0.5,
        )


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Each head of q and k is normed; layers with a window rotate by angles of their own."""

    @staticmethod
    def traits(config: ModelConfig) -> DecoderTraits:
        return DecoderTraits(
            AttentionTraits(config.attention_bias, config.output_bias, head_norm=UnitOffsetRMSNorm),
            layer=GemmaDecoderLayer,
            norm=UnitOffsetRMSNorm,
            embedding_scale=config.hidden_size**0.5,
        )
