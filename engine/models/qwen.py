"""Dense Qwen models."""

from __future__ import annotations

from inferd.engine.config import ModelConfig
from inferd.engine.models.blocks import AttentionTraits
from inferd.engine.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """q, k and v always have a bias, the output projection never."""

    @staticmethod
    def attention_traits(config: ModelConfig) -> AttentionTraits:
        return AttentionTraits(qkv_bias=True, window=config.sliding_window)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Each head of q and k is normed."""

    @staticmethod
    def attention_traits(config: ModelConfig) -> AttentionTraits:
        return AttentionTraits(
            qkv_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm=True,
            window=config.sliding_window,
        )
