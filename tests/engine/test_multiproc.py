"""Worker processes: the answers of one in this process, and an end to all of them whatever one of them meets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd.engine.build import build_engine
from inferd.engine.config import EngineArgs
from inferd.engine.core.output import KnownRequests, NewRequest, SchedulerOutput
from inferd.engine.core.step import EngineCore
from inferd.engine.errors import LoadError, WorkerError
from inferd.engine.executor.multiproc import MultiprocExecutor
from inferd.engine.messages import AddRequest
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.testing.faulty_worker import FAILING_STEP
from inferd.engine.testing.jobs import Job, run_jobs
from inferd.engine.testing.random_checkpoint import make_random_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_checkpoint(tmp_path_factory.mktemp("multiproc") / "model")


@pytest.fixture
def make_args(folder: Path) -> Callable[..., EngineArgs]:
    def make(**options: Any) -> EngineArgs:
        fixed: dict[str, Any] = dict(
            dtype="float32", device="cpu", kernels="torch", num_blocks=40, max_model_len=64, executor="multiproc"
        )
        return EngineArgs(**(dict(model=str(folder)) | fixed | options))

    return make


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """No process, no shared memory, no open file, no thread."""
    before = set(os.listdir("/dev/shm")), _open_files(), threading.active_count()
    yield
    assert psutil.Process().children() == []
    assert (set(os.listdir("/dev/shm")), _open_files(), threading.active_count()) == before


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


SEEDED = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)


def start(args: EngineArgs, **options: Any) -> tuple[EngineCore, MultiprocExecutor]:
    config = resolve(args)
    executor = MultiprocExecutor(config, **options)
    try:
        return EngineCore(config, executor), executor
    except BaseException:
        executor.shutdown()
        raise


def test_one_worker_process_answers_as_one_in_this_process(make_args: Callable[..., EngineArgs]) -> None:
    answers, blocks = [], []
    for executor in ("uniproc", "multiproc"):
        core, ready = build_engine(make_args(executor=executor))
        jobs = [Job(f"job-{at}", (5 + at, 6, 7), SEEDED, joins_at_step=at) for at in range(3)]
        answers.append(run_jobs(core, jobs).tokens)
        blocks.append((ready.num_blocks, core.stats().blocks_free))
        core.shutdown()
        core.shutdown()
    assert answers[0] == answers[1]
    assert blocks == [(40, 39)] * 2


def test_steps_are_sent_before_earlier_ones_are_answered(make_args: Callable[..., EngineArgs]) -> None:
    """And each future gives its own step's tokens. A worker that does not end when it is asked is forced."""
    core, executor = start(make_args())
    params = SamplingParams(temperature=0.0)
    new = [NewRequest(name, [5 + at, 6], 2, params, 0, ([1 + at],), 0) for at, name in enumerate("ab")]
    steps = [
        step(1, new=new[:1], num_scheduled_tokens={"a": 2}),
        step(2, new=new[1:], known=KnownRequests(["a"], [None], [2]), num_scheduled_tokens={"b": 2, "a": 1}),
        step(3, known=KnownRequests(["b"], [None], [2]), num_scheduled_tokens={"b": 1}, finished_ids=["a"]),
    ]
    halves = [(executor.execute_model(output), executor.sample_tokens()) for output in steps]
    assert [execution.result() for execution, _ in halves] == [None] * 3
    sampled = [sampling.result().sampled_token_ids for _, sampling in halves]
    assert [set(tokens) for tokens in sampled] == [{"a"}, {"a", "b"}, {"b"}]
    os.kill(executor.worker_pids[0], signal.SIGSTOP)
    core.shutdown()
    assert not is_running(executor.worker_pids[0])
    with pytest.raises(WorkerError, match="was shut down"):
        executor.warm_up()


def step(number: int, **fields: Any) -> SchedulerOutput:
    empty: dict[str, Any] = dict(
        new=[], known=KnownRequests(), shared_prefixes=[], finished_ids=[], preempted_ids=[], num_scheduled_tokens={}
    )
    total = sum(fields["num_scheduled_tokens"].values())
    return SchedulerOutput(step=number, total_num_scheduled_tokens=total, **(empty | fields))


def test_what_keeps_a_worker_from_loading_is_said(make_args: Callable[..., EngineArgs], tmp_path: Path) -> None:
    broken = make_random_checkpoint(tmp_path / "model")
    (broken / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        build_engine(make_args(model=str(broken)))


def test_a_failing_forward_pass_of_one_rank(make_args: Callable[..., EngineArgs]) -> None:
    """The other rank waits for it and would do so for long."""
    args = make_args(tensor_parallel_size=2)
    core, executor = start(args, worker_module="inferd.engine.testing.faulty_worker")
    failures: list[Exception] = []
    core.on_failure(failures.append)
    core.add(AddRequest("r", [5, 6, 7], SEEDED, 0.0))
    for _ in range(FAILING_STEP - 1):
        core.step()
    with pytest.raises(WorkerError, match="worker 1 failed in execute: ArithmeticError: planted"):
        core.step()
    wait_until(lambda: failures)
    wait_until(lambda: not any(map(is_running, executor.worker_pids)))
    core.on_failure(failures.append)
    assert failures == [failures[0]] * 2  # who asks later is told at once
    with pytest.raises(WorkerError, match="planted"):
        core.step()
    core.shutdown()


def is_running(pid: int) -> bool:
    """A process that has ended and that nobody has waited for does not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    """The promise is a few seconds; a busy test machine gets more."""
    deadline_s = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
