"""Puts one engine together: options → configuration → executor → core. The engine's only composition root."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from inferd.engine.config import EngineArgs, EngineConfig
from inferd.engine.core.step import EngineCore
from inferd.engine.grammar.compiler import GrammarCompiler
from inferd.engine.grammar.manager import GrammarManager
from inferd.engine.grammar.scheduling import StructuredRequests
from inferd.engine.lora.registry import AdapterRegistry
from inferd.engine.messages import EngineReady
from inferd.engine.pooling.checks import pooling_info
from inferd.engine.resolve import resolve
from inferd.engine.sampling.plugins import find_processors, params_checks

if TYPE_CHECKING:
    from inferd.engine.executor.base import Executor


def build_engine(args: EngineArgs) -> tuple[EngineCore, EngineReady]:
    """Loads the model; takes seconds. Raises `ConfigError` or `LoadError`; a failed executor is shut down."""
    started = time.monotonic()
    config = resolve(args)
    executor = make_executor(config)
    try:
        core = EngineCore(
            config,
            executor,
            grammar=make_grammars(config),
            params_checks=params_checks(find_processors()),
            lora=AdapterRegistry(config.lora, executor) if config.lora is not None else None,
        )
    except BaseException:
        executor.shutdown()
        raise
    ready = EngineReady(
        pid=os.getpid(),
        max_model_len=core.max_model_len,
        vocab_size=config.model.vocab_size,
        block_size=config.cache.block_size,
        num_blocks=core.kv_cache_config.num_blocks,
        dtype=config.dtype,
        load_s=time.monotonic() - started,
        decisions=[*config.decisions, *executor.decisions, *core.decisions],
        pooling=pooling_info(config),
        kv_max_concurrency=core.kv_max_concurrency,
    )
    return core, ready


def make_grammars(config: EngineConfig) -> StructuredRequests:
    """Costs nothing before the first request under a grammar."""
    model, settings = config.model, config.grammar
    compiler = GrammarCompiler(
        model.path,
        model.vocab_size,
        model.eos_token_ids,
        backends=settings.backends,
        timeout_s=settings.compile_timeout_s,
    )
    manager = GrammarManager(compiler, model.vocab_size, model.eos_token_ids, cache_bytes=settings.cache_bytes)
    return StructuredRequests(manager, settings.backends)


def make_executor(config: EngineConfig) -> Executor:
    """Imports torch only for an executor that needs it in this process."""
    if config.executor == "scripted":
        from inferd.engine.testing.scripted import ScriptedExecutor

        return ScriptedExecutor(config)
    if config.executor == "multiproc":
        from inferd.engine.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config)
    from inferd.engine.executor.uniproc import UniProcExecutor

    return UniProcExecutor(config)
