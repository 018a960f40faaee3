"""Llama and what copied its shape."""

from __future__ import annotations

from inferd.engine.config import ModelConfig
from inferd.engine.models.blocks import AttentionTraits
from inferd.engine.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    @staticmethod
    def attention_traits(config: ModelConfig) -> AttentionTraits:
        return AttentionTraits(qkv_bias=config.attention_bias, output_bias=config.output_bias)


class MistralForCausalLM(DecoderForCausalLM):
    """Every layer attends within the window, if there is one."""

    @staticmethod
    def attention_traits(config: ModelConfig) -> AttentionTraits:
        return AttentionTraits(window=config.sliding_window)
