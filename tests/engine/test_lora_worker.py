"""A worker's adapters: buffers and slots, captured steps, sleep, and the options they are set up by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferd.engine.config import EngineArgs, EngineConfig, LoRAConfig
from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup
from inferd.engine.core.output import GraphUse
from inferd.engine.errors import ConfigError, EngineError, NotSupported
from inferd.engine.loader.base import load_model
from inferd.engine.lora.forward import LoraForward
from inferd.engine.lora.manager import WorkerAdapters
from inferd.engine.lora.settle import settle_lora
from inferd.engine.resolve import resolve
from inferd.engine.testing import decode_step as steps
from inferd.engine.testing.captured import Again, StaticTorch
from inferd.engine.testing.random_adapter import make_random_adapter
from inferd.engine.testing.random_checkpoint import make_random_checkpoint
from inferd.engine.worker.forward import EagerForward, KVMemory
from inferd.engine.worker.graphs import GraphForward, capture_sizes
from inferd.engine.worker.inputs import StepLayout
from inferd.engine.worker.worker import Worker, allocate_kv_caches
from inferd.kernels.lora.reference import add_lora
from inferd.kernels.sampling.reference import greedy
from inferd.kernels.select import torch_ops

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 100
NUM_ADAPTERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its adapters, "1" to "3"; the last one leaves most linears as they are."""
    folder = tmp_path_factory.mktemp("lora")
    model = make_random_checkpoint(folder / "model")
    for number in range(1, NUM_ADAPTERS + 1):
        targets = ["q_proj"] if number == NUM_ADAPTERS else ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        make_random_adapter(folder / str(number), model, rank=4 * number, targets=targets, seed=number)
    return folder


@pytest.fixture
def config(folder: Path) -> EngineConfig:
    options: dict[str, Any] = dict(dtype="float32", device="cpu", kernels="torch", num_threads=1, block_size=BLOCK_SIZE)
    return resolve(EngineArgs(str(folder / "model"), enable_lora=True, max_loras=2, max_cpu_loras=4, **options))


@pytest.fixture
def twins(folder: Path, config: EngineConfig) -> tuple[LoraForward, LoraForward, WorkerAdapters]:
    """With graphs and without, over one model, its keys and values, and three adapters for two slots."""
    assert config.lora is not None
    ops = torch_ops("test")
    model = load_model(config, ops, CPU)
    specs = model.kv_specs(BLOCK_SIZE)
    plan = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(tuple(specs), next(iter(specs.values()))),))
    backend = StaticTorch(ops, min_saved_tokens=0)
    caches = allocate_kv_caches(plan, backend, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    generator = torch.Generator().manual_seed(0)
    for cache in caches.values():
        cache.normal_(generator=generator)
    adapters = WorkerAdapters(config.lora, CPU, add_lora)
    adapters.attach(model)
    for number in range(1, NUM_ADAPTERS + 1):
        adapters.load(number, str(folder / str(number)))
    eager = EagerForward(model, backend, KVMemory(plan, caches), CPU)
    sizes = capture_sizes(8, share=True, lora=True)
    graphs = GraphForward(eager, greedy, sizes, config.scheduler.max_model_len, Again(), CPU, adapters)
    graphs.capture()
    return LoraForward(eager, adapters), LoraForward(graphs, adapters), adapters


def decode_step(lora_ids: list[int], **changes: Any) -> StepLayout:
    lens = [20 + 7 * row for row in range(len(lora_ids))]
    step = steps.decode_step(lens, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **changes)
    return replace(step, lora_ids=np.array(lora_ids) if any(lora_ids) else None)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


Twins = tuple[LoraForward, LoraForward, WorkerAdapters]


def test_a_replay_equals_the_eager_step(twins: Twins) -> None:
    """Slots change hands from step to step, and what an adapter left in one would show."""
    eager, graphs, _ = twins
    mixes = [[1], [1, 2], [0, 2, 1, 0, 2], [3, 0, 3], [0, 0], [3, 2], [1, 3, 0, 0, 1, 3, 3]]
    for lora_ids in mixes:
        step = decode_step(lora_ids)
        expected, actual = eager.run(step), graphs.run(step)
        assert expected is not None
        assert actual is not None
        size = min(size for size in (1, 2, 4, 8) if size >= len(lora_ids))
        assert actual.graph == GraphUse("decode_lora" if any(lora_ids) else "decode", size)
        assert_close(actual.logits, expected.logits)
        plain = eager.run(replace(step, lora_ids=None))
        assert plain is not None
        changed = (expected.logits != plain.logits).any(dim=1)
        assert changed.tolist() == [adapter_id != 0 for adapter_id in lora_ids]


def test_what_was_not_captured_runs_eagerly(twins: Twins) -> None:
    """Too many rows, and a row of several tokens."""
    eager, graphs, _ = twins
    single = decode_step([2])
    several = replace(
        single,
        query_lens=np.array([5]),
        seq_lens=np.array([5]),
        token_ids=np.arange(5),
        positions=np.arange(5),
        slots=(np.arange(5) + single.block_tables[0][0, 0] * BLOCK_SIZE,),
        logits_indices=np.array([4]),
    )
    for step in (decode_step([1] * 9), several):
        expected, actual = eager.run(step), graphs.run(step)
        assert expected is not None
        assert actual is not None
        assert actual.graph is None
        assert_close(actual.logits, expected.logits)


def test_steps_with_shared_prefixes_and_adapters(twins: Twins) -> None:
    eager, graphs, _ = twins
    step = decode_step([1, 1, 2], shared=[(1, [0, 1])])
    expected, actual = eager.run(step), graphs.run(step)
    assert expected is not None
    assert actual is not None
    assert_close(actual.logits, expected.logits)


def test_a_step_with_an_adapter_that_is_not_here_is_an_error(twins: Twins) -> None:
    eager, graphs, adapters = twins
    adapters.unload(2)
    adapters.unload(2)
    for forward in (eager, graphs):
        with pytest.raises(EngineError, match="adapter 2, which the worker does not hold"):
            forward.run(decode_step([2]))
        with pytest.raises(EngineError, match="adapter 9"):
            forward.run(decode_step([9]))
    assert eager.run(decode_step([0])) is not None


def test_warming_up_leaves_nothing(twins: Twins) -> None:
    eager, _, _ = twins
    before = eager.run(decode_step([3, 0]))
    eager.warm_up(decode_step([0, 0]))
    after = eager.run(decode_step([3, 0]))
    assert before is not None
    assert after is not None
    assert torch.equal(after.logits, before.logits)
    with pytest.raises(EngineError):
        eager.run(decode_step([-1]))


@pytest.fixture
def worker(config: EngineConfig) -> Worker:
    worker = Worker(config)
    worker.load()
    specs = worker.kv_specs()
    worker.initialize_kv_cache(KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(tuple(specs), next(iter(specs.values()))),)))
    worker.warm_up()
    return worker


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_there_again_after_a_sleep(worker: Worker, folder: Path, level: int) -> None:
    """The model is a new one then, with buffers of its own; one more adapter is loaded meanwhile."""
    worker.load_lora(1, str(folder / "1"))
    step = decode_step([1, 0])

    def logits() -> torch.Tensor:
        for cache in worker.kv_caches.values():
            cache.fill_(0.5)
        with torch.inference_mode():
            result = worker.runner.forward.run(step)
        assert result is not None
        return result.logits.clone()

    before = logits()
    worker.sleep(level)
    digest = worker.load_lora(2, str(folder / "2"))
    worker.wake(["weights", "kv_cache"])
    assert torch.equal(logits(), before)
    assert worker.load_lora(5, str(folder / "2")) == digest
    worker.shutdown()


def test_a_worker_says_what_computes_adapters(worker: Worker, folder: Path, config: EngineConfig) -> None:
    assert "lora: plain torch" in worker.decisions
    assert worker.load_lora(7, str(folder / "1")) != worker.load_lora(8, str(folder / "2"))
    without = Worker(replace(config, lora=None))
    with pytest.raises(RuntimeError, match="set up without"):
        without.load_lora(1, str(folder / "1"))


def test_buffers_count_as_memory_of_the_weights(worker: Worker, config: EngineConfig) -> None:
    without = Worker(replace(config, lora=None))
    without.load()
    assert worker.memory().weights > without.memory().weights


@pytest.fixture
def settle(folder: Path) -> Callable[..., LoRAConfig | None]:
    def settle(*, pools: bool = False, **options: Any) -> LoRAConfig | None:
        return settle_lora(EngineArgs(str(folder / "model"), **options), pools=pools, decisions=[])

    return settle


def test_options(settle: Callable[..., LoRAConfig | None]) -> None:
    assert settle(max_loras=0) is None
    assert settle(enable_lora=True) == LoRAConfig(max_loras=1, max_lora_rank=16, max_cpu_loras=1)
    assert settle(enable_lora=True, max_loras=3, max_cpu_loras=9, max_lora_rank=64) == LoRAConfig(3, 64, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_loras=0), "max_loras must be at least 1, got 0"),
        (dict(max_lora_rank=0), "max_lora_rank must be at least 1 and at most 512, got 0"),
        (dict(max_lora_rank=513), "max_lora_rank must be at least 1 and at most 512, got 513"),
        (dict(max_loras=4, max_cpu_loras=3), "max_cpu_loras=3 is below max_loras=4"),
    ],
)
def test_options_that_cannot_be(
    settle: Callable[..., LoRAConfig | None], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(enable_lora=True, **options)


def test_models_that_pool_have_no_adapters(settle: Callable[..., LoRAConfig | None]) -> None:
    with pytest.raises(NotSupported, match="enable_lora is not supported for models that pool"):
        settle(enable_lora=True, pools=True)
