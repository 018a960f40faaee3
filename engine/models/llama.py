"""Llama and what copied its shape."""

from __future__ import annotations

from inferd.engine.config import ModelConfig
from inferd.engine.models.blocks import AttentionTraits, DecoderTraits
from inferd.engine.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    @staticmethod
    def traits(config: ModelConfig) -> DecoderTraits:
        return DecoderTraits(AttentionTraits(qkv_bias=config.attention_bias, output_bias=config.output_bias))


class MistralForCausalLM(DecoderForCausalLM):
    """Without biases."""

    @staticmethod
    def traits(config: ModelConfig) -> DecoderTraits:
        return DecoderTraits()
