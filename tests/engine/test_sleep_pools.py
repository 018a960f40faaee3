"""Tagged memory of a worker: who gives back what, in which order, and what the system has of it."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from inferd.engine.errors import LoadError, NotSupported
from inferd.engine.testing.sleep_figures import resident_bytes as counted_by_the_system
from inferd.engine.worker.host_memory import MappedArena, let_go, resident_bytes, tensor_bytes
from inferd.engine.worker.pools import Pools

CPU, CARD = torch.device("cpu"), torch.device("cuda")
MIB = 1 << 20


class Owner:
    """Keeps a diary."""

    def __init__(self, diary: list[str], name: str, tag: str) -> None:
        self.tag, self.num_bytes, self.kept_bytes = tag, 10, 0
        self.failure: Exception | None = None
        self._diary, self._name = diary, name

    def release(self, level: int) -> None:
        self.kept_bytes = 3 if level == 1 else 0
        self._diary.append(f"-{self._name}{level}")

    def restore(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.kept_bytes = 0
        self._diary.append(f"+{self._name}")


@pytest.fixture
def diary() -> list[str]:
    return []


@pytest.fixture
def owners(diary: list[str]) -> list[Owner]:
    return [Owner(diary, "model", "weights"), Owner(diary, "blocks", "kv_cache"), Owner(diary, "draft", "weights")]


@pytest.fixture
def pools(owners: list[Owner]) -> Pools:
    pools = Pools(CPU)
    for owner in owners:
        pools.add(owner)
    return pools


def test_a_tag_may_have_several_owners(pools: Pools, diary: list[str]) -> None:
    assert pools.release(1) == {"weights": 20, "kv_cache": 10}
    assert (pools.kept_bytes, pools.num_bytes("weights")) == (9, 0)
    restored = pools.restore(["weights", "kv_cache"])
    assert {tag: found.num_bytes for tag, found in restored.items()} == {"weights": 20, "kv_cache": 10}
    assert diary == ["-model1", "-blocks1", "-draft1", "+model", "+draft", "+blocks"]
    assert pools.kept_bytes == 0


def test_what_is_there_is_not_restored_and_what_is_not_is_released_further(pools: Pools, diary: list[str]) -> None:
    assert pools.restore(["weights"]) == {}
    pools.release(1)
    pools.restore(["kv_cache"])
    assert pools.release(2) == {"weights": 0, "kv_cache": 10}
    assert pools.kept_bytes == 0
    assert diary[-3:] == ["-model2", "-blocks2", "-draft2"]


def test_no_step_runs_until_all_is_there(pools: Pools, owners: list[Owner]) -> None:
    pools.check()
    pools.release(2)
    owners[2].failure = LoadError("its file is gone")
    with pytest.raises(LoadError):
        pools.restore(["kv_cache", "weights"])
    with pytest.raises(RuntimeError, match="asleep: weights must be restored first"):
        pools.check()
    owners[2].failure = None
    pools.restore(["weights"])
    pools.check()


def test_memory_of_a_card_is_told_of_and_kept() -> None:
    """Until it has an arena."""
    pools = Pools(CARD)
    assert pools.refusal is not None
    assert pools.make_arena("kv_cache").num_bytes == 0
    with pytest.raises(NotSupported, match="sleep is not supported on cuda yet"):
        pools.release(1)
    pools.check()


def test_an_arena_gives_its_pages_back_and_keeps_its_addresses() -> None:
    arena = MappedArena("kv_cache")
    tensor = arena.empty(64 * MIB)
    address, view = tensor.data_ptr(), tensor.view(torch.float32).view(-1, 1024)
    for _ in range(3):
        view.fill_(1.0)
        full = counted_by_the_system()
        arena.release(1)
        assert full - counted_by_the_system() > 60 * MIB
        arena.restore()
        assert view.sum() == 0
        assert view.data_ptr() == tensor.data_ptr() == address
    assert arena.num_bytes == 64 * MIB


class Knot:
    """Refers to itself, as garbage that only a collection finds."""

    def __init__(self, num_bytes: int) -> None:
        self.tensor = torch.ones(num_bytes, dtype=torch.uint8)
        self.me = self


def test_garbage_that_was_frozen_goes_too() -> None:
    knots = [Knot(MIB) for _ in range(64)]
    gc.freeze()
    try:
        full = resident_bytes()
        knots.clear()
        let_go()
        assert full - resident_bytes() > 48 * MIB
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_tensors_are_counted_wherever_a_model_keeps_them() -> None:
    def packed(weight: torch.Tensor, scale: float) -> object:
        return lambda x: x @ weight * scale

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(100))
            self.tied = self.weight.data[:50]
            self.linear = packed(torch.zeros(10), 2.0)
            self.other = partial(torch.mul, torch.zeros(7))
            self.table = {"angles": [torch.zeros(3)]}
            self.forward_of_child = torch.nn.Linear(2, 2, bias=False).forward

    assert tensor_bytes(Layer(), CPU) == 4 * (100 + 10 + 7 + 3 + 4)
    assert tensor_bytes(Layer(), CARD) == 0
