"""How many bytes an engine may take for keys and values. Pure arithmetic, bytes in and out."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from inferd.engine.config import EngineConfig
from inferd.engine.core.kv.spec import DTYPE_BYTES, KVSpec
from inferd.engine.errors import ConfigError

CPU_KV_CACHE_BYTES = 4 << 30  # main memory is everyone's: more only when one request needs it, or by kv_cache_bytes


def usable_kv_bytes(specs: Iterable[KVSpec], *, num_requests: int, max_model_len: int) -> int:
    """What `num_requests` of the longest context and the null block fill; more would only keep old prefixes."""
    return sum(spec.page_bytes * (1 + num_requests * -(-max_model_len // spec.block_size)) for spec in specs)


def cpu_kv_bytes(config: EngineConfig, specs: list[KVSpec], available_bytes: int) -> int:
    """`available_bytes`: main memory that is free once the weights are in place."""
    limits = config.scheduler
    one = usable_kv_bytes(specs, num_requests=1, max_model_len=limits.max_model_len)
    all_ = usable_kv_bytes(specs, num_requests=limits.max_num_seqs, max_model_len=limits.max_model_len)
    budget = int(available_bytes * config.cache.memory_fraction) - largest_step_bytes(config)
    return max(0, min(budget, all_, max(one, CPU_KV_CACHE_BYTES)))


def largest_step_bytes(config: EngineConfig) -> int:
    """An upper estimate of what one step of the largest batch holds at its peak: one layer's activations and logits."""
    model, limits = config.model, config.scheduler
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_size
    token_bytes = (4 * model.hidden_size + heads + 3 * model.intermediate_size) * DTYPE_BYTES[config.dtype]
    logits_bytes = model.vocab_size * (DTYPE_BYTES[config.dtype] + 3 * DTYPE_BYTES["float32"])
    return limits.max_num_batched_tokens * token_bytes + limits.max_num_seqs * logits_bytes


def requested_bytes(memory_fraction: float, *, total_bytes: int, free_bytes: int) -> int:
    """An accelerator's memory that this engine asks for. Raises ConfigError when it is not free."""
    requested = ceil(total_bytes * memory_fraction)
    if requested > free_bytes:
        raise ConfigError(
            f"memory_fraction={memory_fraction:g} asks for {requested / 2**30:.1f} GiB, but only "
            f"{free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB are free; stop what uses the device, or lower "
            f"memory_fraction below {free_bytes / total_bytes:.2f}"
        )
    return requested
