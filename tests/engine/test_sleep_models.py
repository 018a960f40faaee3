"""Real weights given back and loaded again: the same answers, from the very checkpoint that was loaded."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.errors import EngineError
from inferd.engine.frontend.llm import LLM
from inferd.engine.importer.run import import_gguf
from inferd.engine.params import SamplingParams
from inferd.engine.testing.random_checkpoint import make_random_checkpoint
from inferd.engine.testing.tiny_gguf import tiny_metadata, tiny_tensors, write_gguf

EXECUTORS: dict[str, dict[str, Any]] = {
    "in this process": {"in_process": True},
    "asynchronous": {"in_process": True, "async_scheduling": True},
    "one worker": {"in_process": True, "executor": "multiproc"},
    "two ranks": {"in_process": True, "tensor_parallel_size": 2},
    "engine process": {},
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=12, ignore_eos=True),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_random_checkpoint(tmp_path / "model")


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[LLM]:
    fixed: dict[str, Any] = dict(
        device="cpu", dtype="float32", kernels="torch", run_dir=Path(os.environ["XDG_RUNTIME_DIR"])
    )
    with LLM(folder, **(fixed | {"num_blocks": 40, "max_model_len": 64} | options)) as llm:
        yield llm


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(["a prompt", "another"], PARAMS)]


@pytest.mark.parametrize("name", EXECUTORS)
def test_the_same_answers_after_every_way_to_wake(folder: Path, name: str) -> None:
    with serving(folder, **EXECUTORS[name]) as llm:
        before, memory = answers(llm), llm.memory()
        ways: list[tuple[tuple[int, ...], list[list[str] | None]]] = [
            ((1,), [None]),
            ((2,), [None]),
            ((1, 2), [["kv_cache"], ["weights"]]),
            ((2,), [["weights"], ["kv_cache"]]),
        ]
        for levels, wakes in ways:
            for level in levels:
                assert llm.sleep(level).level == level
            assert llm.is_sleeping()
            with pytest.raises(EngineError, match="wake it"):
                llm.generate("nobody could wake it meanwhile")
            reports = [llm.wake(tags) for tags in wakes]
            assert [report.is_awake for report in reports] == [False] * (len(wakes) - 1) + [True]
            restored = {tag: size for report in reports for tag, size in report.restored_bytes.items()}
            assert restored == {
                "weights": sum(record.weights for record in memory),
                "kv_cache": sum(record.kv for record in memory),
            }
            assert answers(llm) == before
        assert len(memory) == EXECUTORS[name].get("tensor_parallel_size", 1)


def test_what_a_rank_holds(folder: Path) -> None:
    """Weights are what the model keeps alive: parameters in float32, and the tables of angles."""
    num_parameters = (folder / "model.safetensors").stat().st_size // 4
    with serving(folder, in_process=True) as llm:
        (awake,) = llm.memory()
        assert num_parameters * 4 * 0.95 < awake.weights < num_parameters * 4 * 1.1
        assert awake.kv == 40 * 16 * 2 * 2 * 2 * 16 * 4  # blocks, tokens, layers, keys and values, heads, size, bytes
        assert awake.workspace > 0
        assert awake.sleeping_host == 0
        llm.sleep(1)
        (asleep,) = llm.memory()
        assert (asleep.weights, asleep.kv, asleep.workspace) == (0, 0, 0)
        assert asleep.sleeping_host == (folder / "model.safetensors").stat().st_size
        llm.sleep(2)
        assert llm.memory()[0].sleeping_host == 0


@pytest.mark.parametrize("load_format", ["gguf", "dummy"])
def test_other_sources_of_weights(folder: Path, tmp_path: Path, load_format: str) -> None:
    if load_format == "gguf":
        folder = tmp_path / "gguf"
        folder.mkdir()
        import_gguf(write_gguf(folder / "tiny.gguf", tiny_metadata(), tiny_tensors(), "Q4_0"), folder)
    with serving(folder, in_process=True, load_format=load_format) as llm:
        before = answers(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake()
            assert answers(llm) == before


class TestTheCheckpoint:
    def test_is_at_hand_at_level_1_even_when_its_folder_is_gone(self, folder: Path) -> None:
        with serving(folder, in_process=True) as llm:
            before = answers(llm)
            llm.sleep(1)
            shutil.rmtree(folder)
            llm.wake()
            assert answers(llm) == before

    def test_is_read_again_at_level_2(self, folder: Path) -> None:
        """Until it is back, everything sleeps on."""
        with serving(folder, in_process=True) as llm:
            before = answers(llm)
            llm.sleep(2)
            away = folder.rename(folder.with_name("away"))
            with pytest.raises(EngineError, match=r"LoadError: .*model is gone"):
                llm.wake()
            assert llm.is_sleeping()
            away.rename(folder)
            assert llm.wake().is_awake
            assert answers(llm) == before

    def test_must_be_the_one_that_was_loaded(self, folder: Path, tmp_path: Path) -> None:
        other = make_random_checkpoint(tmp_path / "other", seed=1)
        with serving(folder, in_process=True) as llm:
            llm.sleep(2)
            (other / "model.safetensors").replace(folder / "model.safetensors")
            with pytest.raises(EngineError, match=r"LoadError: .*model holds another checkpoint than the one"):
                llm.wake()

    def test_that_was_overwritten_is_noticed_by_what_it_answers(self, folder: Path, tmp_path: Path) -> None:
        other = make_random_checkpoint(tmp_path / "other", seed=1)
        with serving(folder, in_process=True) as llm:
            llm.sleep(1)
            with (folder / "model.safetensors").open("r+b") as file:
                file.write((other / "model.safetensors").read_bytes())
            with pytest.raises(EngineError, match="what was loaded again is not what was there"):
                llm.wake()
            assert llm.is_sleeping()

    def test_that_was_damaged_is_named(self, folder: Path) -> None:
        with serving(folder, in_process=True) as llm:
            llm.sleep(1)
            (folder / "model.safetensors").write_bytes(b"short")
            with pytest.raises(EngineError, match=rf"LoadError: {folder}/model.safetensors cannot be read"):
                llm.wake()


def test_two_ranks_of_which_one_cannot_wake(folder: Path) -> None:
    """Nothing is half awake."""
    with serving(folder, in_process=True, tensor_parallel_size=2) as llm:
        before = answers(llm)
        llm.sleep(2)
        away = folder.rename(folder.with_name("away"))
        with pytest.raises(EngineError, match="LoadError"):
            llm.wake()
        assert all(record.weights == record.kv == 0 for record in llm.memory())
        away.rename(folder)
        llm.wake()
        assert answers(llm) == before


@pytest.mark.parametrize(("num_nights", "num_ranks"), [(20, 1), (6, 2)])
def test_many_nights_leave_nothing_behind(folder: Path, num_nights: int, num_ranks: int) -> None:
    with serving(folder, in_process=True, tensor_parallel_size=num_ranks) as llm:
        before = answers(llm)
        llm.sleep(1)
        llm.wake()
        held = _open_files(), threading.active_count(), [(record.weights, record.kv) for record in llm.memory()]
        for night in range(num_nights):
            llm.sleep(1 + night % 2)
            llm.wake()
        assert answers(llm) == before
        assert held == (
            _open_files(),
            threading.active_count(),
            [(record.weights, record.kv) for record in llm.memory()],
        )


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_engine_that_ends_closes_its_checkpoint(folder: Path) -> None:
    before = _open_files()
    with serving(folder, in_process=True):
        assert _open_files() > before
    assert _open_files() == before
