"""Who runs when adapters have few places, what is kept of an adapter, and what finds its blocks.

On an executor without a model that checks what each block holds, adapters included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from inferd.engine.config import EngineConfig, LoRAConfig
from inferd.engine.core.admission import Refusal, WaitReason
from inferd.engine.core.step import EngineCore
from inferd.engine.core.waiting import MAX_WITHOUT_SLOT
from inferd.engine.errors import EngineError, InvalidRequest, LoadError
from inferd.engine.lora.adapter import AdapterInfo
from inferd.engine.lora.fairness import MAX_OVERTAKEN
from inferd.engine.lora.registry import AdapterRegistry
from inferd.engine.lora.slots import SlotTable
from inferd.engine.messages import AddRequest, Call, EngineOutput, FinishReason
from inferd.engine.params import SamplingParams
from inferd.engine.testing.fake_executor import FakeExecutor

PROMPT = tuple(range(40, 56))  # four blocks


class Disk(FakeExecutor):
    """Adapters can be loaded from folders that hold something, which may change; remembers what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.content: dict[str, str] = {}  # of folders that do not hold their own path
        self.kept: list[int] = []
        self.num_loads = 0

    def load_lora(self, adapter_id: int, path: str) -> str:
        self.num_loads += 1
        held = self.content.get(path, path)
        if not held:
            raise LoadError(f"{path} is gone")
        super().load_lora(adapter_id, held)
        self.kept.append(adapter_id)
        return held

    def unload_lora(self, adapter_id: int) -> None:
        super().unload_lora(adapter_id)
        if adapter_id in self.kept:
            self.kept.remove(adapter_id)


class Engine:
    """A core, and short words for what tests do with it."""

    def __init__(self, config: EngineConfig, lora: LoRAConfig) -> None:
        self.disk = Disk()
        self.registry = AdapterRegistry(lora, self.disk)
        self.core = EngineCore(config, self.disk, lora=self.registry)
        self.outputs: dict[str, list[EngineOutput]] = {}

    def load(self, *names: str) -> None:
        for name in names:
            self.registry.add_lora(name, f"/{name}")

    def add(self, request_id: str, lora: str | None = None, prompt: Sequence[int] = PROMPT, **params: Any) -> None:
        sampling = SamplingParams(max_tokens=params.pop("max_tokens", 4), ignore_eos=True)
        self.core.add(AddRequest(request_id, list(prompt), sampling, 0.0, lora=lora, **params))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.core.step().outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def finish(self) -> None:
        for _ in range(1000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("it did not come to an end")

    def scheduled(self) -> list[str]:
        return sorted(self.disk.outputs[-1].num_scheduled_tokens)

    def passed_by(self) -> dict[str, Refusal]:
        return self.core._scheduler.waiting.own_refusals

    def end_of(self, request_id: str) -> EngineOutput:
        return self.outputs[request_id][-1]

    def infos(self) -> dict[int, AdapterInfo]:
        return {info.id: info for info in self.registry.list_loras()}


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(make_core_config: Callable[..., EngineConfig]) -> MakeEngine:
    def make(max_loras: int = 1, max_cpu_loras: int | None = None, **config: Any) -> Engine:
        return Engine(make_core_config(**config), LoRAConfig(max_loras, 16, max_cpu_loras or max_loras))

    return make


def test_a_request_without_a_place_is_passed_by(make_engine: MakeEngine) -> None:
    engine = make_engine(max_loras=2, max_cpu_loras=3)
    engine.load("a", "b", "c")
    for request_id, lora in (("1", "a"), ("2", "b"), ("3", "c"), ("4", "a"), ("5", None)):
        engine.add(request_id, lora)
    engine.step()
    assert engine.scheduled() == ["1", "2", "4", "5"]
    assert engine.passed_by() == {"3": Refusal(WaitReason.ADAPTER_SLOTS, 3, 2)}
    engine.finish()
    assert {name: outputs[-1].finish_reason for name, outputs in engine.outputs.items()} == dict.fromkeys(
        "12345", FinishReason.LENGTH
    )


def test_a_place_is_free_when_the_last_request_with_the_adapter_ends(make_engine: MakeEngine) -> None:
    engine = make_engine(max_cpu_loras=2)
    engine.load("a", "b")
    engine.add("1", "a", max_tokens=2)
    engine.add("2", "a", max_tokens=4)
    engine.add("3", "b")
    ran = []
    for _ in range(5):
        engine.step()
        ran.append(engine.scheduled())
    assert ran == [["1", "2"], ["1", "2"], ["2"], ["2"], ["3"]]


def test_who_is_aborted_gives_its_place_up(make_engine: MakeEngine) -> None:
    engine = make_engine(max_cpu_loras=2)
    engine.load("a", "b")
    engine.add("1", "a")
    engine.add("2", "b")
    engine.step()
    engine.core.abort(["1"])
    engine.step()
    assert engine.scheduled() == ["2"]


def test_who_is_preempted_gives_its_place_up(make_engine: MakeEngine) -> None:
    engine = make_engine(max_cpu_loras=2, policy="priority")
    engine.load("a", "b")
    engine.add("1", "a", priority=1)
    engine.step()
    engine.core.call(Call(0, "pause", ["keep", True]))
    engine.step()
    engine.add("2", "b", priority=0)
    engine.core.call(Call(0, "resume"))
    engine.step(2)
    assert engine.scheduled() == ["2"]
    engine.finish()
    assert engine.end_of("1").num_preemptions == 1


def test_nobody_waits_for_a_place_forever(make_engine: MakeEngine) -> None:
    """Requests for an adapter that runs overtake one that waits for a place, and at some time no longer."""
    engine = make_engine(max_cpu_loras=2, num_blocks=400, max_num_seqs=4, policy="fcfs")
    engine.load("a", "b")
    engine.add("a0", "a")
    engine.step()
    engine.add("waits", "b")
    num_added = 0
    while "waits" not in engine.scheduled():
        num_added += 1
        engine.add(f"a{num_added}", "a")
        engine.step()
        assert num_added <= MAX_OVERTAKEN + 10
    ended = engine.outputs.keys() - {"a0", "waits"}
    assert len(ended) == MAX_OVERTAKEN
    assert engine.core.stats().waiting == num_added - MAX_OVERTAKEN
    engine.finish()
    assert len(engine.outputs) == num_added + 2


def test_a_step_looks_past_so_many_and_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(max_cpu_loras=2, policy="fcfs")
    engine.load("a", "b")
    engine.add("runs", "a", max_tokens=2)
    for number in range(MAX_WITHOUT_SLOT - 1):
        engine.add(f"b{number}", "b", max_tokens=1)
    engine.add("passes")
    engine.add("last", "b", max_tokens=1)
    engine.add("held up")
    engine.step()
    assert engine.scheduled() == ["passes", "runs"]
    assert len(engine.passed_by()) == MAX_WITHOUT_SLOT
    engine.finish()
    assert len(engine.outputs) == MAX_WITHOUT_SLOT + 3


@pytest.mark.parametrize("leave", ["abort", "hold"])
def test_nobody_waits_for_one_that_does_not_wait_any_more(make_engine: MakeEngine, leave: str) -> None:
    engine = make_engine(max_cpu_loras=2, num_blocks=400, max_num_seqs=4, policy="fcfs")
    engine.load("a", "b")
    engine.add("a0", "a", max_tokens=40)
    engine.add("waits", "b")
    for number in range(MAX_OVERTAKEN + 4):
        engine.add(f"a{number + 1}", "a", max_tokens=1)
    engine.step(MAX_OVERTAKEN // 2)
    engine.add("more", "a", max_tokens=1)
    engine.step(2)
    assert "more" not in engine.scheduled()
    if leave == "abort":
        engine.core.abort(["waits"])
    else:
        waiting = engine.core._scheduler.waiting
        waiting.hold(engine.core._scheduler.requests["waits"], "somebody", 0.0)
    engine.step(4)
    assert "more" in engine.outputs


def test_equal_prompts_find_blocks_of_their_own_adapter_alone(make_engine: MakeEngine) -> None:
    """The executor looks at what each block holds; here is counted that they are found at all."""
    engine = make_engine(max_loras=2, num_blocks=100)
    engine.load("a", "b")
    for round_number in range(2):
        for lora in (None, "a", "b"):
            engine.add(f"{lora}-{round_number}", lora)
        engine.finish()
    cached = {name: outputs[-1].num_cached_tokens for name, outputs in engine.outputs.items()}
    assert cached == {f"{lora}-{n}": 12 * n for lora in (None, "a", "b") for n in range(2)}


def test_other_content_under_a_name_finds_nothing_and_the_same_content_finds_all(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=100)
    for number, held in enumerate(("one", "other", "one")):
        engine.disk.content["/a"] = held
        engine.load("a")
        engine.add(str(number), "a")
        engine.finish()
        engine.registry.remove_lora("a")
    assert [engine.end_of(str(number)).num_cached_tokens for number in range(3)] == [0, 0, 12]


def test_unknown_names_are_told_with_those_that_are_known(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="unknown adapter 'x'; loaded: none"):
        engine.add("1", "x")
    engine.load("a")
    with pytest.raises(InvalidRequest, match="unknown adapter 'x'; loaded: a") as caught:
        engine.add("1", "x")
    assert caught.value.param == "lora"
    with pytest.raises(InvalidRequest, match="unknown adapter 'x'"):
        engine.registry.remove_lora("x")


@pytest.mark.parametrize(("name", "path"), [("", "/a"), ("a", ""), (5, "/a"), ("x" * 300, "/a"), ("\ud800", "/a")])
def test_names_and_paths_that_are_none(make_engine: MakeEngine, name: Any, path: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"adapter|lora"):
        make_engine().registry.add_lora(name, path)


def test_a_name_stands_for_one_folder(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.registry.add_lora("a", "/a")
    assert engine.registry.add_lora("a", "/a") == first
    assert engine.disk.num_loads == 1
    with pytest.raises(InvalidRequest, match="'a' is loaded from /a already; remove it first"):
        engine.registry.add_lora("a", "/b")
    engine.registry.remove_lora("a")
    assert engine.registry.add_lora("a", "/b") != first


def test_an_adapter_removed_between_its_check_and_its_queue_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.load("a")
    request = engine.core.make_request(AddRequest("1", [1, 2], SamplingParams(), 0.0, lora="a"))
    engine.registry.remove_lora("a")
    engine.load("a")
    with pytest.raises(InvalidRequest, match="unknown adapter 'a'"):
        engine.core.add_request(request)
    assert not engine.core.has_work


def test_requests_keep_a_removed_adapter_until_they_end(make_engine: MakeEngine) -> None:
    engine = make_engine(max_cpu_loras=2, max_num_seqs=1)
    engine.load("a")
    engine.add("runs", "a")
    engine.add("waits", "a")
    engine.step()
    assert engine.registry.remove_lora("a") == 2
    with pytest.raises(InvalidRequest, match="loaded: none"):
        engine.add("late", "a")
    assert engine.infos()[1] == AdapterInfo("a", 1, "/a", True, True, num_requests=2, num_running=1)
    engine.finish()
    assert engine.end_of("waits").finish_reason is FinishReason.LENGTH
    assert engine.infos() == {}
    assert engine.disk.kept == []


def test_a_request_id_that_is_taken_holds_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.load("a")
    engine.add("1", "a")
    with pytest.raises(InvalidRequest, match="already in use"):
        engine.add("1", "a")
    engine.finish()
    assert engine.registry.remove_lora("a") == 0


def test_adapters_that_nobody_uses_make_room_in_memory(make_engine: MakeEngine) -> None:
    """Those that run stay, and those that requests wait for go only where there is no other."""
    engine = make_engine(max_loras=1, max_cpu_loras=2, max_num_seqs=2)
    engine.load("a", "b")
    engine.add("1", "a")
    engine.step()
    engine.load("c")
    assert engine.disk.kept == [1, 3]
    engine.add("2", "c")
    engine.load("d")
    assert engine.disk.kept == [1, 4]
    engine.finish()
    assert engine.end_of("2").finish_reason is FinishReason.LENGTH
    assert engine.disk.num_loads == 5
    assert [info.is_in_memory for info in engine.infos().values()] == [False, False, True, True]


@pytest.mark.parametrize(("held", "message"), [("", "/a is gone"), ("something else", "holds something else")])
def test_an_adapter_that_cannot_be_had_again_ends_its_requests_alone(
    make_engine: MakeEngine, held: str, message: str
) -> None:
    engine = make_engine()
    engine.load("a", "b")
    engine.disk.content["/a"] = held
    engine.add("1", "a")
    engine.add("2", "b")
    engine.add("3")
    engine.finish()
    assert engine.end_of("1").finish_reason is FinishReason.ERROR
    assert "adapter 'a' cannot be had again" in (engine.end_of("1").error or "")
    assert message in (engine.end_of("1").error or "")
    assert engine.end_of("1").error_param is None
    assert engine.end_of("2").finish_reason is engine.end_of("3").finish_reason is FinishReason.LENGTH
    assert engine.disk.kept == [2]


def test_what_cannot_be_loaded_leaves_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.disk.content["/a"] = ""
    with pytest.raises(LoadError, match="/a is gone"):
        engine.load("a")
    assert engine.infos() == {}
    engine.disk.content.clear()
    engine.load("a")
    assert [info.is_in_memory for info in engine.infos().values()] == [True]


def test_a_slot_table_keeps_what_is_used() -> None:
    table = SlotTable(2)

    def place(*adapter_ids: int) -> tuple[list[int], list[int]]:
        return table.place(adapter_ids), [table[adapter_id] for adapter_id in adapter_ids]

    assert place(7) == ([7], [0])
    assert place(8) == ([8], [1])
    assert place(7) == ([], [0])
    assert place(9) == ([9], [1])  # 8 was used longest ago
    assert place(8, 9) == ([8], [0, 1])  # 9 is used, so 7 goes
    table.release(9)
    table.release(1000)
    assert place(5) == ([5], [1])
    with pytest.raises(KeyError):
        table[9]
    with pytest.raises(EngineError, match="3 adapters, there are max_loras=2"):
        table.place([1, 2, 3])
    table.clear()
    assert sorted(place(1, 2)[1]) == [0, 1]
