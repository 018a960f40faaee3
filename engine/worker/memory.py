"""How many bytes an engine may take for keys and values: arithmetic over what a probe reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from inferd.engine.config import EngineConfig
from inferd.engine.core.kv.plan import blocks_of_one, group_layers
from inferd.engine.core.kv.spec import DTYPE_BYTES, KVCacheConfig, KVSpec, window_of
from inferd.engine.errors import ConfigError

CPU_KV_CACHE_BYTES = 4 << 30  # main memory is everyone's: more only when one request needs it, or by kv_cache_bytes
_GIB = 1 << 30


@dataclass(frozen=True)
class MemoryReading:
    free_bytes: int
    total_bytes: int


MemoryProbe = Callable[[], MemoryReading]  # of the memory that keys and values will lie in


class DeviceBudget:
    """An accelerator's memory as this engine found it, and its share."""

    def __init__(self, memory_fraction: float, probe: MemoryProbe) -> None:
        """Raises ConfigError when the share is not free."""
        self._probe = probe
        self._at_start = probe()
        self._requested_bytes = requested_bytes(memory_fraction, self._at_start)

    def taken_bytes(self) -> int:
        """That the device has less than this engine found, whoever took it."""
        return max(0, self._at_start.free_bytes - self._probe().free_bytes)

    def left_bytes(self) -> int:
        """What the share has left after the largest step, whose memory counts as used: the next such step needs it.

        Raises ConfigError when nothing is left, or when others gave memory back meanwhile, so that what this engine
        took cannot be told.
        """
        before, now = self._at_start.free_bytes, self._probe().free_bytes
        if now > before:
            raise ConfigError(
                f"the device's free memory grew from {_gib(before)} to {_gib(now)} while it was measured: another "
                "process gave some back. Start again, or set kv_cache_bytes"
            )
        left = self._requested_bytes - (before - now)
        if left <= 0:
            raise ConfigError(
                f"the weights and the largest step take {_gib(before - now)} of the {_gib(self._requested_bytes)} that "
                "memory_fraction allows: nothing is left for keys and values. Raise memory_fraction, lower "
                "max_num_batched_tokens, or choose a smaller model"
            )
        return left


def requested_bytes(memory_fraction: float, memory: MemoryReading) -> int:
    """The memory that this engine asks for. Raises ConfigError when it is not free."""
    requested = ceil(memory.total_bytes * memory_fraction)
    if requested > memory.free_bytes:
        raise ConfigError(
            f"memory_fraction={memory_fraction:g} asks for {_gib(requested)}, but only {_gib(memory.free_bytes)} of "
            f"{_gib(memory.total_bytes)} are free; stop what uses the device, or lower memory_fraction below "
            f"{memory.free_bytes / memory.total_bytes:.2f}"
        )
    return requested


def cpu_kv_bytes(config: EngineConfig, specs: Mapping[str, KVSpec], available_bytes: int) -> int:
    """Of one rank. `available_bytes`: main memory that is free once the weights are in place; all ranks share it."""
    limits, num_ranks = config.scheduler, config.parallel.tensor_parallel_size
    budget = int(available_bytes * config.cache.memory_fraction) // num_ranks - largest_step_bytes(config)
    usual = CPU_KV_CACHE_BYTES // num_ranks
    if not limits.fit_max_model_len:
        usual = max(usual, usable_kv_bytes(config, specs, num_requests=1))
    usable = usable_kv_bytes(config, specs, num_requests=limits.max_num_seqs)
    return max(0, min(without_positions(config, specs, budget), usable, usual))


def usable_kv_bytes(config: EngineConfig, specs: Mapping[str, KVSpec], *, num_requests: int) -> int:
    """What `num_requests` of the longest context and the null block fill; more would only keep old prefixes."""
    limits, groups = config.scheduler, group_layers(specs)
    blocks = blocks_of_one(groups, limits.max_model_len, max_step_tokens=limits.max_uncomputed_tokens)
    return KVCacheConfig(0, groups).block_bytes * (1 + num_requests * blocks)


def without_positions(config: EngineConfig, specs: Mapping[str, KVSpec], num_bytes: int) -> int:
    """What is left of `num_bytes` beside the rope tables of all positions that may then be used."""
    model, limits = config.model, config.scheduler
    num_tables = len({model.rope_of(layer) for layer in range(model.num_layers)})
    position_bytes = num_tables * model.head_size * DTYPE_BYTES["float32"]
    num_positions = limits.max_model_len
    if limits.fit_max_model_len:
        token_bytes = sum(spec.token_bytes for spec in specs.values() if window_of(spec) is None)
        num_positions = min(num_positions, max(num_bytes, 0) // (token_bytes + position_bytes))
    return num_bytes - num_positions * position_bytes


def largest_step_bytes(config: EngineConfig) -> int:
    """An upper estimate of what one step of the largest batch holds at its peak: one layer's activations and logits."""
    model, limits = config.model, config.scheduler
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_size
    token_bytes = (4 * model.hidden_size + heads + 3 * model.intermediate_size) * DTYPE_BYTES[config.dtype]
    logits_bytes = model.vocab_size * (DTYPE_BYTES[config.dtype] + 3 * DTYPE_BYTES["float32"])
    return limits.max_num_batched_tokens * token_bytes + limits.max_num_seqs * logits_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
