"""Architecture name → model class, imported when asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from inferd.engine.config import ModelConfig
from inferd.engine.errors import NotSupported
from inferd.engine.models.base import BuildContext, CausalLM

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
