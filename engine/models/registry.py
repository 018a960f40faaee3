"""Architecture name → model class, imported when asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import cast

from inferd.engine.config import ModelConfig
from inferd.engine.errors import NotSupported
from inferd.engine.model_encoder import ENCODERS
from inferd.engine.models.base import BuildContext, CausalLM, PoolingModel
from inferd.engine.pooling.architectures import split

_MODULES = {
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(_MODULES)


def model_class(architecture: str) -> Callable[[ModelConfig, BuildContext], CausalLM]:
    """Raises NotSupported naming the architecture and those that exist."""
    if architecture not in _MODULES:
        known = ", ".join(supported_architectures())
        raise NotSupported(f"architecture {architecture} is not supported; supported: {known}", param="model")
    module = import_module(f"inferd.engine.models.{_MODULES[architecture]}")
    return cast(Callable[[ModelConfig, BuildContext], CausalLM], getattr(module, architecture))


def pooling_class(architecture: str) -> Callable[[ModelConfig, BuildContext], PoolingModel]:
    """What gives an architecture's hidden states, with its head of labels in place of one of logits."""
    if architecture in ENCODERS:
        from inferd.engine.models.bert import BertModel

        return BertModel
    from inferd.engine.models.decoder import DecoderForCausalLM
    from inferd.engine.models.pooled import DecoderForPooling

    decoder = cast(type[DecoderForCausalLM], model_class(split(architecture)[0]))
    return partial(DecoderForPooling, traits=decoder.traits)
