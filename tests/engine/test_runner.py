"""Worker and runner without a scheduler: steps made by hand, calls in and out of turn, memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferd.engine.config import EngineArgs, EngineConfig
from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup, KVSpec
from inferd.engine.core.output import GrammarBitmask, KnownRequests, NewRequest, SchedulerOutput
from inferd.engine.errors import ConfigError, EngineError
from inferd.engine.executor.uniproc import UniProcExecutor
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.testing.kv import poison_kv_cache
from inferd.engine.testing.model_folder import make_model_folder
from inferd.engine.worker import memory
from inferd.engine.worker.worker import Worker

BLOCK_SIZE = 4
GIB = 1 << 30

MakeConfig = Callable[..., EngineConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    folder = make_model_folder(tmp_path / "model")

    def make(**changes: Any) -> EngineConfig:
        options: dict[str, Any] = dict(
            load_format="dummy", dtype="float32", device="cpu", num_threads=1, block_size=BLOCK_SIZE, max_num_seqs=8
        )
        return resolve(EngineArgs(str(folder), **(options | changes)))

    return make


def kv_config(worker: Worker, num_blocks: int = 40) -> KVCacheConfig:
    specs = worker.kv_specs()
    return KVCacheConfig(num_blocks, (KVCacheGroup(tuple(specs), next(iter(specs.values()))),))


@pytest.fixture
def worker(make_config: MakeConfig) -> Worker:
    """Ready to run, with NaN wherever nothing was stored."""
    worker = Worker(make_config())
    worker.load()
    worker.initialize_kv_cache(kv_config(worker))
    worker.warm_up()
    poison_kv_cache(worker)
    return worker


def new_request(request_id: str, token_ids: list[int], block_ids: list[int], **changes: Any) -> NewRequest:
    fields: dict[str, Any] = dict(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(temperature=0.0),
        seed=1,
        block_ids=(block_ids,),
        num_computed_tokens=0,
    )
    return NewRequest(**(fields | changes))


def step(scheduled: dict[str, int], **changes: Any) -> SchedulerOutput:
    fields: dict[str, Any] = dict(
        step=1,
        new=[],
        known=KnownRequests(),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        shared_prefixes=[],
        finished_ids=[],
        preempted_ids=[],
    )
    return SchedulerOutput(**(fields | changes))


def known(**num_computed: int) -> KnownRequests:
    return KnownRequests(list(num_computed), [None] * len(num_computed), list(num_computed.values()))


def run(worker: Worker, output: SchedulerOutput) -> dict[str, list[int]]:
    worker.execute_model(output)
    return worker.sample_tokens().sampled_token_ids


def test_chunks_give_no_token_before_the_last(worker: Worker) -> None:
    prompt = list(range(20, 31))
    whole = run(worker, step({"a": 11}, new=[new_request("a", prompt, [3, 1, 2])]))
    assert list(whole) == ["a"]
    assert run(worker, step({"b": 5}, new=[new_request("b", prompt, [7, 5, 6])])) == {}
    assert run(worker, step({"b": 5}, known=known(b=5))) == {}
    assert run(worker, step({"b": 1}, known=known(b=10))) == {"b": whole["a"]}


def test_sampled_tokens_stay_with_the_worker(worker: Worker) -> None:
    """The second token is right only if the first one, which nobody sends back, is the input of its step."""
    [first] = run(worker, step({"a": 3}, new=[new_request("a", [20, 21, 22], [1])]))["a"]
    [second] = run(worker, step({"a": 1}, known=known(a=3)))["a"]
    resumed = new_request("b", [20, 21, 22, first], [2], num_prompt_tokens=3)
    assert run(worker, step({"b": 4}, new=[resumed])) == {"b": [second]}


def test_blocks_that_come_later_are_appended(worker: Worker) -> None:
    prompt = list(range(20, 30))
    expected = run(worker, step({"a": 10}, new=[new_request("a", prompt, [4, 5, 6])]))["a"]
    run(worker, step({"b": 4}, new=[new_request("b", prompt, [9])]))
    later = KnownRequests(["b"], [([12, 10],)], [4])
    assert run(worker, step({"b": 6}, known=later)) == {"b": expected}


def test_a_step_may_only_forget(worker: Worker) -> None:
    run(worker, step({"a": 3}, new=[new_request("a", [20, 21, 22], [1])]))
    assert run(worker, step({}, finished_ids=["a", "never seen"])) == {}
    with pytest.raises(EngineError, match="'a', which it does not hold"):
        worker.execute_model(step({"a": 1}, known=known(a=3)))


@pytest.mark.parametrize("field", ["finished_ids", "preempted_ids"])
def test_an_id_may_leave_and_return_in_one_step(worker: Worker, field: str) -> None:
    expected = run(worker, step({"a": 3}, new=[new_request("a", [20, 21, 22], [1])]))
    run(worker, step({"b": 2}, new=[new_request("b", [50, 51], [2])]))
    again = new_request("b", [20, 21, 22], [3])
    assert run(worker, step({"b": 3}, new=[again], **{field: ["b"]})) == {"b": expected["a"]}


def test_unscheduled_requests_keep_their_rows(worker: Worker) -> None:
    prompts = {"a": [20, 21, 22], "b": [40, 41], "c": [60]}
    new = [new_request(name, tokens, [index + 1]) for index, (name, tokens) in enumerate(prompts.items())]
    first = run(worker, step({"a": 3, "b": 2, "c": 1}, new=new))
    assert set(first) == set(prompts)
    together = run(worker, step({"c": 1, "a": 1}, known=known(c=1, a=3), finished_ids=["b"]))
    alone = new_request("d", [60, *first["c"]], [9], num_prompt_tokens=1)
    assert run(worker, step({"d": 2}, new=[alone])) == {"d": together["c"]}


def test_halves_of_a_step_alternate(worker: Worker) -> None:
    with pytest.raises(RuntimeError, match="without execute"):
        worker.sample_tokens()
    worker.execute_model(step({"a": 3}, new=[new_request("a", [20, 21, 22], [1])]))
    with pytest.raises(RuntimeError, match="twice"):
        worker.execute_model(step({}))
    worker.sample_tokens()
    with pytest.raises(RuntimeError, match="without execute"):
        worker.sample_tokens()


def test_a_bitmask_finds_its_rows(worker: Worker) -> None:
    """Its rows are in the scheduler's order, for some of the requests, and may name one that is not sampled."""
    new = [new_request(name, [20 + index], [1 + index]) for index, name in enumerate("abc")]
    worker.execute_model(step({"a": 1, "b": 1, "c": 1}, new=new))
    free = worker.sample_tokens().sampled_token_ids
    words = np.zeros((3, 9), np.int32)
    words[0, 1], words[1, 0], words[2, 8] = 1 << 3, 1 << 7, 1 << 15  # the only tokens: 35, 7, 271
    again = [new_request(name + "2", [20 + index], [4 + index]) for index, name in enumerate("abc")]
    worker.execute_model(step({"b2": 1, "a2": 1, "c2": 1}, new=again))
    result = worker.sample_tokens(GrammarBitmask(["c2", "gone", "a2"], words))
    assert result.sampled_token_ids == {"a2": [271], "b2": free["b"], "c2": [35]}
    assert result.errors == {}


def test_a_request_with_nan_logits_fails_alone(worker: Worker) -> None:
    alone = run(worker, step({"alone": 2}, new=[new_request("alone", [20, 21], [5])], finished_ids=[]))["alone"]
    new = [
        new_request("lost", [20, 21, 22, 23, 24], [2, 3], num_computed_tokens=4),  # nobody filled block 2
        new_request("fine", [20, 21], [1]),
    ]
    worker.execute_model(step({"lost": 1, "fine": 2}, new=new))
    result = worker.sample_tokens()
    assert result.sampled_token_ids == {"fine": alone}
    assert (list(result.errors), result.num_corrupted) == (["lost"], 1)
    assert "NaN or infinite logits" in result.errors["lost"]
    again = run(worker, step({"fine": 1, "alone": 1}, known=known(fine=2, alone=2), finished_ids=["lost"]))
    assert again["fine"] == again["alone"]


def test_calls_out_of_order_are_refused(make_config: MakeConfig) -> None:
    worker = Worker(make_config())
    for call in (worker.kv_specs, worker.available_kv_bytes, worker.warm_up, worker.sample_tokens):
        with pytest.raises(RuntimeError, match="load"):
            call()
    worker.load()
    with pytest.raises(RuntimeError, match="second time"):
        worker.load()
    with pytest.raises(RuntimeError, match="initialize_kv_cache comes first"):
        _ = worker.kv_caches
    with pytest.raises(RuntimeError, match="initialize_kv_cache"):
        worker.warm_up()
    worker.initialize_kv_cache(kv_config(worker))
    with pytest.raises(RuntimeError, match="already"):
        worker.initialize_kv_cache(kv_config(worker))
    worker.shutdown()
    with pytest.raises(RuntimeError, match="load"):
        worker.warm_up()


def test_kv_memory_is_raw_bytes_seen_through_the_spec(worker: Worker) -> None:
    spec = next(iter(worker.kv_specs().values()))
    assert set(worker.kv_caches) == set(worker.kv_specs())
    for cache in worker.kv_caches.values():
        assert cache.nbytes == 40 * spec.page_bytes
        assert cache.dtype is torch.float32


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 1, "max_model_len": 16}, {"max_num_batched_tokens": 1}])
def test_warm_up_stores_nothing(make_config: MakeConfig, limits: dict[str, int]) -> None:
    worker = Worker(make_config(**limits))
    worker.load()
    worker.initialize_kv_cache(kv_config(worker))
    poison_kv_cache(worker)
    worker.warm_up()
    assert all(cache.isnan().all() for cache in worker.kv_caches.values())


def test_executor_puts_errors_into_its_futures(make_config: MakeConfig) -> None:
    executor = UniProcExecutor(make_config())
    executor.initialize_kv_cache(kv_config(executor.worker))
    assert executor.execute_model(step({"a": 1}, new=[new_request("a", [20], [1])])).result() is None
    assert list(executor.sample_tokens().result().sampled_token_ids) == ["a"]
    future = executor.execute_model(step({"b": 1}, known=known(b=3)))
    assert future.done()
    assert isinstance(future.exception(), EngineError)
    assert any("attention: " in decision for decision in executor.decisions)
    executor.shutdown()
    executor.shutdown()


def test_missing_kernels_are_a_config_error(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from inferd.engine.worker import worker as module
    from inferd.kernels.common.ops import KernelUnavailable

    def refuse(*_: Any, **__: Any) -> None:
        raise KernelUnavailable("no compiler; choose kernels='auto'")

    monkeypatch.setattr(module, "build_ops", refuse)
    with pytest.raises(ConfigError, match="no compiler"):
        Worker(make_config(kernels="native")).load()


def test_given_kv_bytes_are_taken_as_they_are(make_config: MakeConfig) -> None:
    worker = Worker(make_config(kv_cache_bytes=123_456))
    worker.load()
    assert worker.available_kv_bytes() == 123_456


ROPE_BYTES = 4 * 16  # a position of the tiny model's table
SPEC = KVSpec(block_size=16, num_kv_heads=4, head_size=64, dtype="float32")


def test_cpu_memory_for_keys_and_values(make_config: MakeConfig) -> None:
    """Never more than is free, than could be used, or than a program may quietly take from everyone's memory."""
    few = make_config(max_num_seqs=1, max_model_len=1024, memory_fraction=0.5)
    specs = {f"layers.{index}": SPEC for index in range(30)}
    page_bytes = 30 * SPEC.page_bytes
    assert memory.cpu_kv_bytes(few, specs, 64 * GIB) == page_bytes * (1 + 1024 // 16)
    assert memory.cpu_kv_bytes(few, specs, GIB // 8) == GIB // 16 - memory.largest_step_bytes(few) - 1024 * ROPE_BYTES
    assert memory.cpu_kv_bytes(few, specs, 1000) == 0
    many = make_config(max_num_seqs=256, max_model_len=1024)
    assert memory.cpu_kv_bytes(many, specs, 64 * GIB) == memory.CPU_KV_CACHE_BYTES
    long = {f"layers.{index}": SPEC for index in range(3000)}
    assert memory.cpu_kv_bytes(few, long, 64 * GIB) == 3000 * SPEC.page_bytes * (1 + 1024 // 16)


def test_an_accelerators_memory_must_be_free() -> None:
    ample, taken = memory.MemoryReading(99 * GIB, 100 * GIB), memory.MemoryReading(50 * GIB, 100 * GIB)
    assert memory.requested_bytes(0.9, ample) == 90 * GIB
    with pytest.raises(
        ConfigError, match=r"asks for 90\.0 GiB, but only 50\.0 GiB of 100\.0 GiB are free.* below 0\.50"
    ):
        memory.requested_bytes(0.9, taken)


def test_what_the_largest_step_leaves_of_the_share() -> None:
    """Of 100 GiB 98 are free, 90 are asked for; weights and step take 30, 89.5 and 90 of them, or less than nothing."""

    def left(free_gib: float) -> int:
        readings = iter([98.0, free_gib])
        return memory.DeviceBudget(0.9, lambda: memory.MemoryReading(int(next(readings) * GIB), 100 * GIB)).left_bytes()

    assert left(68) == 60 * GIB
    assert left(8.5) == GIB // 2
    with pytest.raises(ConfigError, match=r"take 90\.0 GiB of the 90\.0 GiB.*nothing is left.*Raise memory_fraction"):
        left(8)
    with pytest.raises(ConfigError, match=r"grew from 98\.0 GiB to 99\.0 GiB.*set kv_cache_bytes"):
        left(99)
