"""Factories of the engine core's tests; each gives a working thing, a test names only what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RopeConfig,
    SchedulerConfig,
    SchedulingPolicy,
)
from inferd.engine.core.admission import AdmissionGate
from inferd.engine.core.clock import Clock, steady_time
from inferd.engine.core.grammar import GrammarManager
from inferd.engine.core.kv.hashing import make_block_hasher
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup, KVSpec
from inferd.engine.core.lora import LoraManager
from inferd.engine.core.scheduler import Scheduler
from inferd.engine.core.step import EngineCore
from inferd.engine.messages import AddRequest, MultimodalFeature
from inferd.engine.params import SamplingParams
from inferd.engine.request import Request
from inferd.engine.testing.fake_executor import FakeExecutor


@pytest.fixture(scope="session")
def make_add() -> Callable[..., AddRequest]:
    def make(request_id: str = "a", prompt: Sequence[int] = (5, 6, 7), **params: Any) -> AddRequest:
        names = ("cache_salt", "features", "priority", "client", "lane", "lora", "name")
        extra = {name: params.pop(name) for name in names if name in params}
        return AddRequest(request_id, list(prompt), SamplingParams(**params), 0.0, **extra)

    return make


@pytest.fixture(scope="session")
def make_request(make_add: Callable[..., AddRequest]) -> Callable[..., Request]:
    def make(
        request_id: str = "a",
        prompt: Sequence[int] = (5, 6, 7),
        *,
        hash_block_size: int = 4,
        features: list[MultimodalFeature] | None = None,
        seed: bytes = b"test",
        **params: Any,
    ) -> Request:
        add = make_add(request_id, prompt, features=features, **params)
        hasher = make_block_hasher(hash_block_size, seed)
        return Request(add, seed=1, max_tokens=add.params.max_tokens or 1, block_hasher=hasher)

    return make


@pytest.fixture(scope="session")
def make_kv() -> Callable[..., KVCacheManager]:
    def make(
        *,
        num_blocks: int = 17,
        block_size: int = 4,
        hash_block_size: int = 4,
        enable_prefix_caching: bool = True,
        max_model_len: int = 64,
    ) -> KVCacheManager:
        spec = KVSpec(block_size, num_kv_heads=1, head_size=2, dtype="float32")
        return KVCacheManager(
            KVCacheConfig(num_blocks, (KVCacheGroup(("layers.0",), spec),)),
            hash_block_size=hash_block_size,
            enable_prefix_caching=enable_prefix_caching,
            max_model_len=max_model_len,
        )

    return make


@pytest.fixture(scope="session")
def make_scheduler(make_kv: Callable[..., KVCacheManager]) -> Callable[..., Scheduler]:
    def make(
        *,
        max_num_seqs: int = 16,
        budget: int = 64,
        max_model_len: int = 64,
        share_prefix_attention: bool = True,
        eos_token_ids: Sequence[int] = (2,),
        policy: SchedulingPolicy = "fair",
        long_prefill_token_threshold: int = 0,
        gates: Sequence[AdmissionGate] = (),
        clock: Clock = steady_time,
        **kv: Any,
    ) -> Scheduler:
        limits = (max_num_seqs, budget, max_model_len, share_prefix_attention, policy, long_prefill_token_threshold)
        kv_manager = make_kv(max_model_len=max_model_len, **kv)
        return Scheduler(SchedulerConfig(*limits), kv_manager, eos_token_ids, gates, clock=clock)

    return make


@pytest.fixture(scope="session")
def make_core_config() -> Callable[..., EngineConfig]:
    def make(
        *,
        block_size: int = 4,
        hash_block_size: int = 4,
        num_blocks: int | None = 33,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 16,
        budget: int = 64,
        max_model_len: int = 64,
        share_prefix_attention: bool = True,
        vocab_size: int = 97,
        seed: int = 0,
        **scheduler: Any,
    ) -> EngineConfig:
        return EngineConfig(
            model=_model(vocab_size, max_model_len),
            cache=CacheConfig(
                block_size, hash_block_size, enable_prefix_caching, num_blocks, kv_cache_bytes, 0.9, "float32"
            ),
            scheduler=SchedulerConfig(max_num_seqs, budget, max_model_len, share_prefix_attention, **scheduler),
            parallel=ParallelConfig(),
            device="cpu",
            dtype="float32",
            load_format="dummy",
            attention_backend="auto",
            kernels="auto",
            num_threads=1,
            seed=seed,
            executor="scripted",
        )

    return make


@pytest.fixture(scope="session")
def make_core(make_core_config: Callable[..., EngineConfig]) -> Callable[..., EngineCore]:
    """An `EngineCore` over the given executor, a `FakeExecutor` by default."""

    def make(
        *,
        executor: FakeExecutor | None = None,
        hash_seed: bytes = b"",
        grammar: GrammarManager | None = None,
        lora: LoraManager | None = None,
        clock: Clock = steady_time,
        **config: Any,
    ) -> EngineCore:
        engine_config = make_core_config(**config)
        executor = executor or FakeExecutor(block_size=engine_config.cache.block_size)
        return EngineCore(engine_config, executor, hash_seed=hash_seed, grammar=grammar, lora=lora, clock=clock)

    return make


def _model(vocab_size: int, max_position: int) -> ModelConfig:
    return ModelConfig(
        path=Path("/nonexistent"),
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=4,
        intermediate_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_size=2,
        norm_eps=1e-5,
        rope=RopeConfig(),
        max_position=max_position,
        tie_embeddings=True,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        eos_token_ids=(2,),
        bos_token_id=1,
        checkpoint_dtype="float32",
    )
