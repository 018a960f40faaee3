"""How much KV memory an engine gets: pure arithmetic over bytes and specs."""

from __future__ import annotations

from collections.abc import Mapping

from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup, KVSpec
from inferd.engine.errors import ConfigError, NotSupported


def plan_kv_cache(
    specs: Mapping[str, KVSpec], *, available_bytes: int, max_model_len: int, num_blocks: int | None = None
) -> KVCacheConfig:
    """Group the layers and count the blocks that fit into `available_bytes`; `num_blocks` overrides the count.

    Raises `ConfigError` when not even one request of `max_model_len` tokens fits, naming the longest that does, and
    `NotSupported` for layers of more than one kind.
    """
    group = _one_group(specs)
    block_bytes = group.spec.page_bytes * len(group.layer_names)
    planned = available_bytes // block_bytes if num_blocks is None else num_blocks
    num_needed = 1 + -(-max_model_len // group.spec.block_size)  # and the null block
    if planned < num_needed:
        raise ConfigError(_too_small(planned, num_needed, max_model_len, group, is_override=num_blocks is not None))
    return KVCacheConfig(planned, (group,))


def _one_group(specs: Mapping[str, KVSpec]) -> KVCacheGroup:
    kinds = dict.fromkeys(specs.values())
    if len(kinds) != 1:
        names = ", ".join(str(kind) for kind in kinds) or "none"
        raise NotSupported(f"a model must keep one kind of KV cache in all its layers, this one keeps: {names}")
    return KVCacheGroup(tuple(specs), next(iter(kinds)))


def _too_small(planned: int, num_needed: int, max_model_len: int, group: KVCacheGroup, *, is_override: bool) -> str:
    layers, spec = len(group.layer_names), group.spec
    feasible = max(planned - 1, 0) * spec.block_size
    room = f"the KV cache has room for {feasible} tokens in {max(planned, 0)} blocks, one of them kept empty"
    if is_override:
        raise_what = f"raise num_blocks to at least {num_needed}"
    else:
        raise_what = f"raise kv_cache_bytes to at least {num_needed * spec.page_bytes * layers}, raise memory_fraction"
    lower = f"lower max_model_len to at most {feasible}" if feasible else "choose a smaller model"
    return f"One request of max_model_len={max_model_len} tokens does not fit: {room}. Either {raise_what}, or {lower}."
