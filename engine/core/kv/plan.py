"""How much KV memory an engine gets, and for how many tokens: pure arithmetic over bytes and specs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from inferd.engine.core.kv.spec import EncoderOnlySpec, KVCacheConfig, KVCacheGroup, KVSpec
from inferd.engine.errors import ConfigError, NotSupported

MAX_PADDED_SHARE = 0.1  # of all layers: room in a group that no layer uses, for the sake of fewer groups


def plan_kv_cache(
    specs: Mapping[str, KVSpec],
    *,
    available_bytes: int,
    max_model_len: int,
    max_step_tokens: int | None = None,
    num_blocks: int | None = None,
    fit_max_model_len: bool = False,
) -> KVCacheConfig:
    """Group the layers and count the blocks that fit into `available_bytes`; `num_blocks` overrides the count.

    `max_step_tokens`: the most that a step computes of one request, which bounds what layers with a window hold.
    Raises `ConfigError` when not even one request of `max_model_len` tokens fits, naming the longest that does; with
    `fit_max_model_len` that one becomes the result's `max_model_len` instead. Raises `NotSupported` for layers whose
    pages cannot be brought to one size.
    """
    groups = group_layers(specs)
    config = KVCacheConfig(0, groups)
    if not groups:
        return replace(config, num_blocks=1, max_model_len=max_model_len if fit_max_model_len else None)
    planned = max(available_bytes, 0) // config.block_bytes if num_blocks is None else num_blocks
    step_tokens = max_model_len if max_step_tokens is None else max_step_tokens
    feasible = longest_context(groups, planned, max_step_tokens=step_tokens, limit=max_model_len)
    if feasible == max_model_len:
        return replace(config, num_blocks=planned, max_model_len=max_model_len if fit_max_model_len else None)
    if fit_max_model_len and feasible > 1:
        return replace(config, num_blocks=planned, max_model_len=feasible)
    num_needed = 1 + blocks_of_one(groups, max_model_len, max_step_tokens=step_tokens)  # and the null block
    needed = f"num_blocks to at least {num_needed}"
    if num_blocks is None:
        needed = f"kv_cache_bytes to at least {num_needed * config.block_bytes}, raise memory_fraction"
    way_out = f"lower max_model_len to at most {feasible}" if feasible else "choose a smaller model"
    raise ConfigError(
        f"One request of max_model_len={max_model_len} tokens does not fit: the KV cache has room for "
        f"{feasible} tokens in {planned} blocks, one of them kept empty. Either raise {needed}, or {way_out}."
    )


def blocks_of_one(groups: Sequence[KVCacheGroup], num_tokens: int, *, max_step_tokens: int) -> int:
    """The most blocks that one request of `num_tokens` holds at any time."""
    return sum(group.spec.max_blocks(num_tokens, max_step_tokens) for group in groups)


def longest_context(groups: Sequence[KVCacheGroup], num_blocks: int, *, max_step_tokens: int, limit: int) -> int:
    """The most tokens, up to `limit`, of which one request fits into `num_blocks`, the null block among them."""

    def needed(num_tokens: int) -> int:
        return 1 + blocks_of_one(groups, num_tokens, max_step_tokens=max_step_tokens)

    return bisect_right(range(1, limit + 1), num_blocks, key=needed)


def group_layers(specs: Mapping[str, KVSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers of one kind in groups of one size, so that the groups can share memory layer by layer.

    Full attention comes first. Layers that keep nothing are in no group. Raises
    `NotSupported` for a model that has no layers, and as `plan_kv_cache` does.
    """
    if not specs:
        raise NotSupported("a model that keeps no keys and values in any layer is not supported")
    specs = {name: spec for name, spec in specs.items() if not isinstance(spec, EncoderOnlySpec)}
    if not specs:
        return ()
    kinds: dict[KVSpec, list[str]] = {}
    for name, spec in zip(specs, _with_one_page_size(list(specs.values())), strict=True):
        kinds.setdefault(spec, []).append(name)
    size = _group_size([len(names) for names in kinds.values()])
    ordered = sorted(kinds.items(), key=lambda kind: type(kind[0]) is not KVSpec)
    return tuple(
        KVCacheGroup(tuple(names[start : start + size]), spec)
        for spec, names in ordered
        for start in range(0, len(names), size)
    )


def _with_one_page_size(specs: Sequence[KVSpec]) -> list[KVSpec]:
    """Layers that keep less per token get more tokens into a page."""
    largest = max(specs, key=lambda spec: spec.page_bytes)
    for spec in specs:
        if largest.page_bytes % spec.page_bytes:
            raise NotSupported(
                f"layers whose pages have {spec.page_bytes} and {largest.page_bytes} bytes cannot share one KV cache: "
                f"the larger must be a multiple of the smaller ({spec}, {largest})"
            )
    return [replace(spec, block_size=spec.block_size * (largest.page_bytes // spec.page_bytes)) for spec in specs]


def _group_size(num_layers: Sequence[int]) -> int:
    """The largest that leaves little room unused: each group costs a block table and its metadata in every step."""
    total = sum(num_layers)

    def num_padded(size: int) -> int:
        return sum(-count % size for count in num_layers)

    return next(size for size in range(max(num_layers), 0, -1) if num_padded(size) <= MAX_PADDED_SHARE * total)
