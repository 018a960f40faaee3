"""Dense Qwen models."""

from __future__ import annotations

from inferd.engine.config import ModelConfig
from inferd.engine.layers.norm import RMSNorm
from inferd.engine.models.blocks import AttentionTraits, DecoderTraits
from inferd.engine.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """q, k and v always have a bias, the output projection never."""

    @staticmethod
    def traits(config: ModelConfig) -> DecoderTraits:
        return DecoderTraits(AttentionTraits(qkv_bias=True))


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Each head of q and k is normed."""

    @staticmethod
    def traits(config: ModelConfig) -> DecoderTraits:
        attention = AttentionTraits(config.attention_bias, config.output_bias, head_norm=RMSNorm)
        return DecoderTraits(attention)
