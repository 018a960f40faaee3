"""The engine. Names load on first use: importing this package imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferd.engine.config import EngineArgs, EngineConfig, SpeculativeArgs
    from inferd.engine.frontend.async_llm import AsyncLLM
    from inferd.engine.frontend.llm import LLM
    from inferd.engine.frontend.lora import LoRARequest
    from inferd.engine.params import SamplingParams
    from inferd.engine.pooling.params import PoolingParams

_HOMES = {
    "AsyncLLM": "inferd.engine.frontend.async_llm",
    "EngineArgs": "inferd.engine.config",
    "EngineConfig": "inferd.engine.config",
    "LLM": "inferd.engine.frontend.llm",
    "LoRARequest": "inferd.engine.frontend.lora",
    "PoolingParams": "inferd.engine.pooling.params",
    "SamplingParams": "inferd.engine.params",
    "SpeculativeArgs": "inferd.engine.config",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineArgs",
    "EngineConfig",
    "LoRARequest",
    "PoolingParams",
    "SamplingParams",
    "SpeculativeArgs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
