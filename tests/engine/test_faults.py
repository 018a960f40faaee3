"""Whatever breaks under an engine's streams: each of them hears of it, and no process or memory stays behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd.engine.config import EngineArgs
from inferd.engine.errors import EngineDeadError, EngineError, InvalidRequest, RequestFailed
from inferd.engine.frontend.async_llm import AsyncLLM
from inferd.engine.frontend.llm import LLM
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.testing.faults import install
from inferd.engine.testing.random_checkpoint import make_random_checkpoint

ENDLESS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, output_kind=OutputKind.DELTA)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
NUM_STREAMS = 6
LIMIT_S = 20.0  # the promise is two seconds; a busy test machine gets more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture
def make_args(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineArgs]:
    """Of engines that break when they are asked to."""
    install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    def make(**options: Any) -> EngineArgs:
        return EngineArgs(str(folder), dtype="float32", device="cpu", kernels="torch", **options)

    return make


@pytest.fixture
def run_dir() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"])


@asynccontextmanager
async def doomed(args: EngineArgs, run_dir: Path) -> AsyncIterator[AsyncLLM]:
    """An engine that is dead at the end of the block, and of which then nothing stays."""
    shared_memory = set(os.listdir("/dev/shm"))
    llm = await AsyncLLM.start(args, run_dir)
    engine = psutil.Process(llm.ready.pid)
    processes = [engine, *engine.children(recursive=True)]
    yield llm
    assert not llm.is_alive
    assert llm.num_unfinished == 0
    await llm.shutdown()
    await until_gone(processes)
    assert os.listdir(run_dir) == []
    assert set(os.listdir("/dev/shm")) == shared_memory


async def until_gone(processes: Sequence[psutil.Process]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while any(map(is_running, processes)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def answer(llm: AsyncLLM, prompt: str, params: SamplingParams, seen: list[int] | None = None) -> list[int]:
    tokens: list[int] = []
    async for output in llm.generate(prompt, params):
        tokens += output.outputs[0].token_ids
        if seen is not None:
            seen += output.outputs[0].token_ids
    return tokens


def with_fault(kind: str, *, rank: int = 0, steps: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=200, ignore_eos=True, extra_args={"fault": kind, "rank": rank, "steps": steps})


@pytest.mark.parametrize(
    ("options", "fault", "said"),
    [
        ({}, {"kind": "raise"}, "ArithmeticError: planted in the forward pass"),
        ({"async_scheduling": True}, {"kind": "raise", "steps": 4}, "ArithmeticError: planted in the forward pass"),
        ({}, {"kind": "die", "steps": 2}, "was ended by SIGKILL"),
        ({"tensor_parallel_size": 2}, {"kind": "raise", "rank": 1}, "worker 1 failed in execute: ArithmeticError"),
        ({"tensor_parallel_size": 2}, {"kind": "die", "rank": 0}, r"worker 0 \(process \d+\) was ended by SIGKILL"),
        (
            {"tensor_parallel_size": 2, "step_timeout_s": 2.0},
            {"kind": "stop", "rank": 0, "steps": 3},
            r"was not answered within 2 s: .*worker 0 \(process \d+\) is stopped",
        ),
    ],
    ids=["raises in a prompt", "raises ahead", "dies while it answers", "a rank raises", "a rank dies", "a rank hangs"],
)
async def test_a_step_that_breaks_ends_every_stream(
    make_args: Callable[..., EngineArgs], run_dir: Path, options: dict[str, Any], fault: dict[str, Any], said: str
) -> None:
    async with doomed(make_args(**options), run_dir) as llm:
        seen: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(answer(llm, f"prompt {at}", ENDLESS, own)) for at, own in enumerate(seen)]
        async with asyncio.timeout(LIMIT_S):
            while not all(seen):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        streams.append(asyncio.create_task(answer(llm, "the last", with_fault(**fault))))
        async with asyncio.timeout(LIMIT_S):
            results = await asyncio.gather(*streams, return_exceptions=True)
            death = await llm.wait_dead()
        assert [type(result) for result in results] == [EngineDeadError] * (NUM_STREAMS + 1)
        with pytest.raises(EngineDeadError, match=rf"(?s){said}"):
            raise death
        with pytest.raises(EngineDeadError):
            await answer(llm, "too late", SHORT)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_while_it_loads(make_args: Callable[..., EngineArgs], run_dir: Path, rank: int) -> None:
    starting = asyncio.create_task(AsyncLLM.start(make_args(tensor_parallel_size=2), run_dir))
    workers: list[psutil.Process] = []
    async with asyncio.timeout(2 * LIMIT_S):
        while len(workers) < 2:
            await asyncio.sleep(0.005)
            workers = [child for engine in engines() for child in engine.children()]
        processes = [*engines(), *workers]
        by_age = sorted(workers, key=lambda worker: worker.pid)
        by_age[rank].kill()
        with pytest.raises(EngineError, match=rf"could not start: worker {rank} .* was ended by SIGKILL") as failed:
            await starting
    await until_gone(processes)
    assert str(by_age[rank].pid) in str(failed.value)
    assert os.listdir(run_dir) == []


def engines() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "--start-file" in child.cmdline()]


async def test_a_rank_that_dies_in_its_sleep(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    """Streams that were held hear of it without anybody waking the engine."""
    async with doomed(make_args(tensor_parallel_size=2), run_dir) as llm:
        await llm.sleep(1)
        held = asyncio.create_task(answer(llm, "held", SHORT))
        while (await llm.call("stats"))["waiting"] < 1:
            pass
        psutil.Process(llm.ready.pid).children()[1].kill()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineDeadError, match=r"(?s)worker 1 \(process \d+\) was ended by SIGKILL"):
                await held
        with pytest.raises(EngineDeadError):
            await llm.wake()


async def test_a_request_that_breaks_on_arrival_fails_alone(
    make_args: Callable[..., EngineArgs], run_dir: Path
) -> None:
    llm = await AsyncLLM.start(make_args(), run_dir)
    prompts = [f"prompt {at}" for at in range(NUM_STREAMS)]
    expected = [await answer(llm, prompt, SHORT) for prompt in prompts]
    broken = with_fault("preprocessing")
    results = await asyncio.gather(
        *(answer(llm, prompt, SHORT) for prompt in prompts),
        *(answer(llm, prompt, broken) for prompt in prompts),
        return_exceptions=True,
    )
    assert results[:NUM_STREAMS] == expected
    for failed in results[NUM_STREAMS:]:
        with pytest.raises(RequestFailed, match="LookupError: planted where requests come in"):
            raise failed  # type: ignore[misc]
    stats = await llm.call("stats")
    assert (stats["running"], stats["waiting"], stats["blocks_free"]) == (0, 0, stats["blocks_total"])
    await llm.shutdown()


def test_a_prompt_that_breaks_in_this_process_fails_alone(
    folder: Path, make_args: Callable[..., EngineArgs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with LLM(folder, in_process=True, dtype="float32", device="cpu", kernels="torch") as llm:
        expected = llm.generate(["one", "two"], SHORT)
        with pytest.raises((RequestFailed, InvalidRequest), match="LookupError: planted where requests come in"):
            llm.generate(["one", "two", "three"], [SHORT, with_fault("preprocessing"), SHORT])
        again = llm.generate(["one", "two"], SHORT)
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in expected]
