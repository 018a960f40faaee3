"""From an engine's configuration, and what its executor says, to KV memory and whoever manages it."""

from __future__ import annotations

from dataclasses import replace

from inferd.engine.config import EngineConfig
from inferd.engine.core.clock import Clock
from inferd.engine.core.kv.events import KVEventLog
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.kv.plan import blocks_of_one, plan_kv_cache
from inferd.engine.core.kv.spec import KVCacheConfig
from inferd.engine.executor.base import Executor


def plan_for(config: EngineConfig, executor: Executor) -> KVCacheConfig:
    """Raises `ConfigError` when not one request of the longest context fits."""
    available_bytes = config.cache.kv_cache_bytes
    if available_bytes is None or config.speculative is not None:  # workers know what a draft model takes of it
        available_bytes = executor.available_kv_bytes()
    return plan_kv_cache(
        executor.kv_specs(),
        available_bytes=available_bytes,
        max_model_len=config.scheduler.max_model_len,
        max_step_tokens=config.scheduler.max_uncomputed_tokens,
        num_blocks=config.cache.num_blocks,
        fit_max_model_len=config.scheduler.fit_max_model_len,
    )


def with_longest_context(config: EngineConfig, plan: KVCacheConfig) -> EngineConfig:
    if plan.max_model_len is None:
        return config
    return replace(config, scheduler=replace(config.scheduler, max_model_len=plan.max_model_len))


def max_concurrency(config: EngineConfig, plan: KVCacheConfig) -> float:
    """How many requests of the longest context fit at once; 0.0 when requests take no blocks."""
    limits = config.scheduler
    needed = blocks_of_one(plan.groups, limits.max_model_len, max_step_tokens=limits.max_uncomputed_tokens)
    return (plan.num_blocks - 1) / needed if needed else 0.0


def make_manager(config: EngineConfig, plan: KVCacheConfig, events: KVEventLog | None, clock: Clock) -> KVCacheManager:
    return KVCacheManager(
        plan,
        hash_block_size=config.cache.hash_block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_model_len=config.scheduler.max_model_len,
        max_step_tokens=config.scheduler.max_uncomputed_tokens,
        max_steps_under_way=config.scheduler.max_concurrent_batches,
        events=events,
        clock=clock,
    )
