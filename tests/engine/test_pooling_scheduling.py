"""Scheduling of what pools: whole texts without a KV cache, over the real scheduler and no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inferd.engine.config import SchedulerConfig
from inferd.engine.core.admission import WaitReason
from inferd.engine.core.kv.coordinator import NoPrefixCacheCoordinator, make_coordinator
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.kv.plan import group_layers, plan_kv_cache
from inferd.engine.core.kv.pool import BlockPool
from inferd.engine.core.kv.spec import EncoderOnlySpec, KVCacheConfig, KVSpec
from inferd.engine.core.output import ModelRunnerOutput
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.messages import AddRequest, FinishReason
from inferd.engine.params import SamplingParams
from inferd.engine.pooling.params import PoolingInput, PoolingParams
from inferd.engine.request import Request

ENCODER = EncoderOnlySpec(16, num_kv_heads=2, head_size=8, dtype="float32")
NOTHING = KVCacheConfig(1, ())


@pytest.fixture
def make_encoder_scheduler() -> Callable[..., Scheduler]:
    def make(*, budget: int = 20, max_num_seqs: int = 8, async_scheduling: bool = False) -> Scheduler:
        kv = KVCacheManager(NOTHING, hash_block_size=4, enable_prefix_caching=True, max_model_len=20)
        limits = SchedulerConfig(
            max_num_seqs, budget, 20, True, async_scheduling=async_scheduling, enable_chunked_prefill=False
        )
        return Scheduler(limits, kv, ())

    return make


def text(request_id: str, length: int) -> Request:
    pooling = PoolingInput(PoolingParams())
    add = AddRequest(request_id, [5] * length, SamplingParams(max_tokens=1), 0.0, pooling=pooling)
    return Request(add, seed=1, max_tokens=1)


def scheduled(scheduler: Scheduler) -> tuple[Any, dict[str, int]]:
    output = scheduler.schedule()
    return output, output.num_scheduled_tokens


def test_no_text_is_cut(make_encoder_scheduler: Callable[..., Scheduler]) -> None:
    """The first that does not fit waits for the next step, and holds up those behind it."""
    scheduler = make_encoder_scheduler()
    for name, length in {"a": 12, "b": 9, "c": 3, "d": 20}.items():
        scheduler.add(text(name, length))
    output, tokens = scheduled(scheduler)
    assert tokens == {"a": 12}
    refusal = scheduler.waiting.head_refusal
    assert refusal is not None
    assert (refusal.reason, refusal.needed, refusal.available) == (WaitReason.TOKEN_BUDGET, 9, 8)
    scheduler.update_from_output(output, ModelRunnerOutput({}, pooled={"a": b"1234"}))
    output, tokens = scheduled(scheduler)
    assert tokens == {"b": 9, "c": 3}
    scheduler.update_from_output(output, ModelRunnerOutput({}, pooled={"b": b"", "c": b""}))
    assert scheduled(scheduler)[1] == {"d": 20}


def test_a_text_is_done_with_its_vector(make_encoder_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_encoder_scheduler()
    for name in ("a", "b"):
        scheduler.add(text(name, 4))
    output, _ = scheduled(scheduler)
    assert output.new[0].pooling == PoolingInput(PoolingParams())
    assert output.new[0].block_ids == ()
    (one, other) = scheduler.update_from_output(
        output, ModelRunnerOutput({}, errors={"b": "not finite"}, pooled={"a": b"1234"})
    )
    assert (other.request_id, other.pooled, other.finish_reason) == ("a", b"1234", FinishReason.STOP)
    assert (one.request_id, one.error, one.finish_reason) == ("b", "not finite", FinishReason.ERROR)
    assert sorted(scheduler.schedule().finished_ids) == ["a", "b"]
    assert not scheduler.has_work


def test_a_step_ahead_computes_nothing_twice(make_encoder_scheduler: Callable[..., Scheduler]) -> None:
    scheduler = make_encoder_scheduler(async_scheduling=True)
    scheduler.add(text("a", 20))
    first, tokens = scheduled(scheduler)
    assert tokens == {"a": 20}
    scheduler.add(text("b", 5))
    second, tokens = scheduled(scheduler)
    assert tokens == {"b": 5}
    scheduler.abort(["a"])
    assert scheduler.update_from_output(first, ModelRunnerOutput({}, pooled={"a": b"late"})) == []
    (output,) = scheduler.update_from_output(second, ModelRunnerOutput({}, pooled={"b": b"1234"}))
    assert output.pooled == b"1234"


def test_a_model_that_keeps_nothing_has_a_plan() -> None:
    plan = plan_kv_cache({"a": ENCODER, "b": ENCODER}, available_bytes=0, max_model_len=512)
    assert plan == NOTHING
    assert (plan.tensors, plan.block_bytes) == ((), 0)
    fitted = plan_kv_cache({"a": ENCODER}, available_bytes=0, max_model_len=512, fit_max_model_len=True)
    assert fitted.max_model_len == 512
    assert (ENCODER.page_bytes, ENCODER.max_blocks(512, 512)) == (0, 0)


def test_layers_that_keep_nothing_take_no_room_beside_others() -> None:
    full = KVSpec(16, num_kv_heads=2, head_size=8, dtype="float32")
    assert [group.layer_names for group in group_layers({"a": full, "b": ENCODER, "c": full})] == [("a", "c")]


def test_the_coordinator_of_no_group_finds_nothing_and_gives_nothing() -> None:
    coordinator = make_coordinator(NOTHING, BlockPool(1), hash_block_size=4, enable_prefix_caching=True)
    assert isinstance(coordinator, NoPrefixCacheCoordinator)
    hits = coordinator.find_hits([b"x"], 100)
    assert (hits.num_tokens, hits.blocks) == (0, ())
    assert coordinator.num_blocks_to_take("a", 1000, None) == 0
    assert coordinator.grow("a", 1000) == ()
    assert coordinator.room("a")[0] > 10**9
    coordinator.free("a")
