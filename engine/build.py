"""Puts one engine together: options → configuration → executor → core. The engine's only composition root."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from inferd.engine.config import EngineArgs, EngineConfig
from inferd.engine.core.step import EngineCore
from inferd.engine.messages import EngineReady
from inferd.engine.resolve import resolve

if TYPE_CHECKING:
    from inferd.engine.executor.uniproc import UniProcExecutor
    from inferd.engine.testing.scripted import ScriptedExecutor


def build_engine(args: EngineArgs) -> tuple[EngineCore, EngineReady]:
    """Loads the model; takes seconds. Raises `ConfigError` or `LoadError`; a failed executor is shut down."""
    started = time.monotonic()
    config = resolve(args)
    executor = make_executor(config)
    try:
        core = EngineCore(config, executor)
    except BaseException:
        executor.shutdown()
        raise
    ready = EngineReady(
        pid=os.getpid(),
        max_model_len=config.scheduler.max_model_len,
        vocab_size=config.model.vocab_size,
        block_size=config.cache.block_size,
        num_blocks=core.kv_cache_config.num_blocks,
        dtype=config.dtype,
        load_s=time.monotonic() - started,
        decisions=[*config.decisions, *executor.decisions],
    )
    return core, ready


def make_executor(config: EngineConfig) -> UniProcExecutor | ScriptedExecutor:
    """Imports torch only for an executor that needs it."""
    if config.executor == "scripted":
        from inferd.engine.testing.scripted import ScriptedExecutor

        return ScriptedExecutor(config)
    from inferd.engine.executor.uniproc import UniProcExecutor

    return UniProcExecutor(config)
