"""Whoever waits on a dead engine hears of it, and no engine outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import MPClient
from inferd.engine.errors import EngineDeadError
from inferd.engine.frontend.async_llm import AsyncLLM
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.testing.model_folder import make_model_folder

PARENT = Path(__file__).parents[1] / "fakes" / "engine_parent.py"


@pytest.fixture
def run_dir() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"])


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., EngineArgs]:
    def make(**scripted: Any) -> EngineArgs:
        folder = make_model_folder(tmp_path / "model", **scripted)
        return EngineArgs(model=str(folder), executor="scripted", device="cpu")

    return make


def is_running(pid: int) -> bool:
    """A process that has ended and that nobody has waited for does not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pid: int) -> None:
    """The promise is three seconds; a busy test machine gets more."""
    deadline = time.monotonic() + 15
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


async def until(condition: Callable[[], object]) -> None:
    """For what has no event to wait for. A hang here fails by the test's time limit."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def drain(llm: AsyncLLM, prompt: str, seen: list[str]) -> None:
    params = SamplingParams(max_tokens=1000, output_kind=OutputKind.DELTA)
    async for output in llm.generate(prompt, params):
        seen.append(output.outputs[0].text)


async def test_killed_under_sixteen_streams(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    llm = await AsyncLLM.start(make_args(delay_s=0.005), run_dir)
    seen: list[list[str]] = [[] for _ in range(16)]
    streams = [asyncio.create_task(drain(llm, f"prompt {number}", texts)) for number, texts in enumerate(seen)]
    await until(lambda: all(seen))
    os.kill(llm.ready.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        results = await asyncio.gather(*streams, return_exceptions=True)
        death = await llm.wait_dead()
    assert [type(result) for result in results] == [EngineDeadError] * 16
    assert "SIGKILL" in str(death)
    assert not llm.is_alive
    assert llm.num_unfinished == 0
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await drain(llm, "late", [])
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await llm.call("stats")
    assert os.listdir(run_dir) == []
    await llm.shutdown()


async def test_a_fatal_error_says_what_it_was(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    llm = await AsyncLLM.start(make_args(fail_at_step=5), run_dir)
    results = await asyncio.gather(*(drain(llm, f"prompt {n}", []) for n in range(4)), return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 4
    assert "scripted failure at step 5" in str(await llm.wait_dead())
    await llm.shutdown()


async def test_killed_while_loading(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    starting = asyncio.create_task(AsyncLLM.start(make_args(load_s=60.0), run_dir))
    await until(engine_pids)
    os.kill(engine_pids()[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await starting


def engine_pids() -> list[int]:
    """Of the engine processes that this one has started."""
    return [child.pid for child in psutil.Process().children() if "--start-file" in child.cmdline()]


def test_killed_while_ordinary_code_waits(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    client = MPClient(make_args(), run_dir)
    killer = threading.Timer(0.2, os.kill, [client.ready.pid, signal.SIGKILL])
    killer.start()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.get_outputs()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.call("stats")
    killer.join()
    client.shutdown()


@pytest.mark.parametrize("how", ["loop", "thread"])
def test_a_killed_parent_takes_its_engine_along(make_args: Callable[..., EngineArgs], run_dir: Path, how: str) -> None:
    command = [sys.executable, str(PARENT), how, make_args().model, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        assert is_running(engine_pid)
        parent.kill()
    wait_gone(engine_pid)
