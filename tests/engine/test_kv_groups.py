"""Models whose layers keep different things: grouping, memory that layers share, and how much of a request fits."""

from __future__ import annotations

import msgspec
import pytest

from inferd.engine.core.kv.plan import group_layers, longest_context, plan_kv_cache
from inferd.engine.core.kv.spec import KVSpec, SlidingWindowSpec
from inferd.engine.errors import ConfigError, NotSupported
from inferd.engine.executor import wire

FULL = KVSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="float32")  # 64 bytes a page
SLIDING = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="float32", window=8)


def layers(pattern: str, **kinds: KVSpec) -> dict[str, KVSpec]:
    """One layer a letter: f full attention, s sliding window."""
    return {f"layers.{index}": ({"f": FULL, "s": SLIDING} | kinds)[kind] for index, kind in enumerate(pattern)}


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("ffff", [4]),
        ("ssss", [4]),
        ("sfsf", [2, 2]),
        ("sssssf" * 3, [3] * 6),
        ("sssssf" * 4 + "ss", [4, 4, 4, 4, 4, 4, 2]),  # two places of a group without a layer
        ("ff" + "s" * 20 + "f", [3, 5, 5, 5, 5]),
    ],
)
def test_groups_are_of_one_size(pattern: str, sizes: list[int]) -> None:
    groups = group_layers(layers(pattern))
    assert [len(group.layer_names) for group in groups] == sizes
    assert sorted(name for group in groups for name in group.layer_names) == sorted(layers(pattern))
    kinds = [group.spec == FULL for group in groups]
    assert kinds == sorted(kinds, reverse=True)  # full attention first


def test_layers_of_different_groups_share_memory() -> None:
    config = plan_kv_cache(layers("sfssfs"), available_bytes=11 * 2 * 64 + 5, max_model_len=8)
    assert config.num_blocks == 11
    assert config.tensors == (("layers.1", "layers.0", "layers.3"), ("layers.4", "layers.2", "layers.5"))


def test_a_plan_travels_to_worker_processes() -> None:
    config = plan_kv_cache(layers("sfssfs"), available_bytes=5000, max_model_len=10**6, fit_max_model_len=True)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(wire.pack(config)))
    assert wire.unpack(plain) == config
    assert config.max_model_len is not None


def test_a_layer_that_keeps_less_gets_longer_pages() -> None:
    narrow = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float32", window=8)
    config = plan_kv_cache(layers("fs", s=narrow), available_bytes=6400, max_model_len=8)
    assert [group.spec.block_size for group in config.groups] == [4, 8]
    assert {group.spec.page_bytes for group in config.groups} == {64}
    odd = KVSpec(block_size=2, num_kv_heads=1, head_size=3, dtype="float32")
    with pytest.raises(NotSupported, match=r"48 and 64 bytes.*head_size=3"):
        group_layers(layers("fs", s=odd))


def test_a_window_makes_room_for_longer_contexts() -> None:
    """Two layers: full attention takes a block for each 4 tokens, the window at most ceil((8 - 1 + 4) / 4) + 1."""
    groups = group_layers(layers("fs"))
    assert longest_context(groups, 1 + 4 + 10, max_step_tokens=4, limit=1000) == 40
    assert longest_context(groups, 1 + 4 + 4, max_step_tokens=4, limit=1000) == 16
    assert longest_context(groups, 1 + 4 + 3, max_step_tokens=4, limit=1000) == 12  # less than the window holds
    assert longest_context(groups, 1 + 4 + 10, max_step_tokens=4, limit=30) == 30
    assert longest_context(groups, 1 + 14, max_step_tokens=1000, limit=1000) == 28  # in one step nothing is given back


def test_what_does_not_fit_is_told_with_the_longest_that_does() -> None:
    specs = layers("fs")
    assert plan_kv_cache(specs, available_bytes=15 * 64, max_model_len=40, max_step_tokens=4).num_blocks == 15
    with pytest.raises(ConfigError, match=r"max_model_len=41.*kv_cache_bytes to at least 1024.*at most 40\."):
        plan_kv_cache(specs, available_bytes=15 * 64, max_model_len=41, max_step_tokens=4)


def test_the_longest_context_can_be_left_to_memory() -> None:
    specs = layers("fs")
    plan = dict(max_step_tokens=4, fit_max_model_len=True)
    assert plan_kv_cache(specs, available_bytes=15 * 64, max_model_len=10**9, **plan).max_model_len == 40
    assert plan_kv_cache(specs, available_bytes=15 * 64, max_model_len=24, **plan).max_model_len == 24
    with pytest.raises(ConfigError, match="choose a smaller model"):
        plan_kv_cache(specs, available_bytes=2 * 64, max_model_len=10**9, **plan)
