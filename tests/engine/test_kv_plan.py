"""From bytes to blocks."""

from __future__ import annotations

import pytest

from inferd.engine.core.kv.plan import plan_kv_cache
from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.errors import ConfigError, NotSupported

SPEC = KVSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="bfloat16")  # 1024 bytes a page
TWO_LAYERS = {"layers.0": SPEC, "layers.1": SPEC}


def test_all_layers_of_one_kind_share_one_table():
    config = plan_kv_cache(TWO_LAYERS, available_bytes=10 * 2048 + 2047, max_model_len=100)
    assert config.num_blocks == 10
    assert [group.layer_names for group in config.groups] == [("layers.0", "layers.1")]
    assert config.groups[0].spec == SPEC


def test_num_blocks_overrides_memory():
    assert plan_kv_cache(TWO_LAYERS, available_bytes=0, max_model_len=32, num_blocks=3).num_blocks == 3


def test_one_longest_request_and_the_null_block_must_fit():
    assert plan_kv_cache(TWO_LAYERS, available_bytes=4 * 2048, max_model_len=48).num_blocks == 4
    with pytest.raises(ConfigError) as raised:
        plan_kv_cache(TWO_LAYERS, available_bytes=4 * 2048, max_model_len=49)
    message = str(raised.value)
    assert "max_model_len=49" in message
    assert "lower max_model_len to at most 48" in message
    assert "raise kv_cache_bytes to at least 10240" in message
    assert "memory_fraction" in message


def test_an_override_that_is_too_small_names_itself():
    with pytest.raises(ConfigError, match="raise num_blocks to at least 4, or lower max_model_len to at most 32"):
        plan_kv_cache(TWO_LAYERS, available_bytes=10**9, max_model_len=40, num_blocks=3)


@pytest.mark.parametrize("available_bytes", [-5, 0, 2048])
def test_no_room_at_all(available_bytes):
    with pytest.raises(ConfigError, match=r"room for 0 tokens.*choose a smaller model"):
        plan_kv_cache(TWO_LAYERS, available_bytes=available_bytes, max_model_len=16)


def test_a_model_without_kv_is_refused():
    with pytest.raises(NotSupported, match="keeps no keys and values"):
        plan_kv_cache({}, available_bytes=10**6, max_model_len=16)
