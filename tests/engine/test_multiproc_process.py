"""An engine process with workers of its own: same answers, and whoever dies takes the others along."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import InprocClient, MPClient
from inferd.engine.errors import EngineDeadError
from inferd.engine.frontend.async_llm import AsyncLLM
from inferd.engine.messages import AddRequest
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.testing.random_checkpoint import make_random_checkpoint

PROMPTS = ["one", "another prompt", "a third one that is longer"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("multiproc") / "model")


@pytest.fixture
def make_args(folder: Path) -> Callable[..., EngineArgs]:
    def make(**options: Any) -> EngineArgs:
        return EngineArgs(str(folder), dtype="float32", device="cpu", kernels="torch", **options)

    return make


@pytest.fixture
def run_dir() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"])


def workers_of(engine_pid: int) -> list[psutil.Process]:
    return psutil.Process(engine_pid).children()


def wait_gone(processes: list[psutil.Process]) -> None:
    """The promise is a few seconds; a busy test machine gets more."""
    deadline_s = time.monotonic() + 15
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def answer_here(args: EngineArgs) -> list[list[int]]:
    """Of one rank in this process."""
    client, tokens = InprocClient(args), []
    for prompt in PROMPTS:
        client.add(AddRequest("r", list(prompt.encode()), GREEDY, 0.0))
        tokens.append([])
        while not tokens[-1] or len(tokens[-1]) < 12:
            tokens[-1] += [token for output in client.get_outputs().outputs for token in output.new_token_ids]
    client.shutdown()
    return tokens


async def answer(llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY) -> list[int]:
    async for output in llm.generate(prompt, params):
        tokens = output.outputs[0].token_ids
    return list(tokens)


async def test_two_ranks_behind_an_engine_process(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    """The same answers; then one of the workers is killed under many streams."""
    shared_memory = set(os.listdir("/dev/shm"))
    llm = await AsyncLLM.start(make_args(tensor_parallel_size=2), run_dir)
    assert await asyncio.gather(*(answer(llm, prompt) for prompt in PROMPTS)) == answer_here(make_args())

    workers = workers_of(llm.ready.pid)
    assert len(workers) == 2
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    streams = [asyncio.create_task(answer(llm, f"prompt {number}", endless)) for number in range(6)]
    while (await llm.call("stats"))["running"] < 6:
        pass
    workers[1].kill()
    results = await asyncio.gather(*streams, return_exceptions=True)
    death = await llm.wait_dead()
    assert [type(result) for result in results] == [EngineDeadError] * 6
    assert f"worker 1 (process {workers[1].pid}) was ended by SIGKILL" in str(death)
    await llm.shutdown()
    wait_gone(workers)
    assert os.listdir(run_dir) == []
    assert set(os.listdir("/dev/shm")) == shared_memory


def test_a_stopped_worker_is_found_by_the_watchdog(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    """The other one waits for it in the middle of its forward pass."""
    client = MPClient(make_args(tensor_parallel_size=2, step_timeout_s=1.0), run_dir)
    workers = workers_of(client.ready.pid)
    workers[1].suspend()
    client.add(AddRequest("r", [1, 2, 3], GREEDY, 0.0))
    with pytest.raises(EngineDeadError, match=r"was not answered within 1 s: .*worker 1 .* is stopped"):
        client.get_outputs()
    client.shutdown()
    wait_gone(workers)


def test_a_worker_that_dies_while_nothing_runs(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    client = MPClient(make_args(executor="multiproc"), run_dir)
    workers_of(client.ready.pid)[0].kill()
    with pytest.raises(EngineDeadError, match=r"worker 0 .* was ended by SIGKILL"):
        client.get_outputs()
    client.shutdown()


def test_even_a_stopped_worker_ends_with_its_engine(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    client = MPClient(make_args(executor="multiproc"), run_dir)
    workers = workers_of(client.ready.pid)
    assert len(workers) == 1
    workers[0].suspend()
    os.kill(client.ready.pid, signal.SIGKILL)
    wait_gone(workers)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.get_outputs()
    client.shutdown()
