"""One engine behind three transports: all behave alike, and the processes among them are hard to kill by accident."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import AsyncMPClient, EngineCoreClient, InprocClient, MPClient
from inferd.engine.core.link import EngineLink
from inferd.engine.errors import ConfigError, EngineDeadError, EngineError, LoadError
from inferd.engine.messages import AddRequest, EngineOutput, EngineOutputs, FinishReason
from inferd.engine.params import SamplingParams
from inferd.engine.testing.model_folder import make_model_folder
from inferd.engine.testing.scripted import ScriptedExecutor


class FromOrdinaryCode:
    """`AsyncMPClient` driven from a test without a loop, so that one test serves all three."""

    def __init__(self, args: EngineArgs, run_dir: Path) -> None:
        self._runner = asyncio.Runner()
        try:
            self._client = self._runner.run(AsyncMPClient.start(args, run_dir))
        except BaseException:
            self._runner.close()
            raise
        self.ready = self._client.ready

    def add(self, request: AddRequest) -> None:
        self._runner.run(self._client.add(request))

    def abort(self, request_ids: Iterable[str]) -> None:
        self._runner.run(self._client.abort(request_ids))

    def call(self, method: str, *args: Any) -> Any:
        return self._runner.run(self._client.call(method, *args))

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        return self._runner.run(self._client.get_outputs())

    def shutdown(self, drain_s: float = 0.0) -> None:
        self._runner.run(self._client.shutdown(drain_s))

    def close(self) -> None:
        self._runner.close()


@pytest.fixture
def run_dir() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"])


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., EngineArgs]:
    def make(**scripted: Any) -> EngineArgs:
        folder = make_model_folder(tmp_path / "model", **scripted)
        return EngineArgs(model=str(folder), executor="scripted", device="cpu", block_size=4, max_model_len=64)

    return make


MakeClient = Callable[..., EngineCoreClient]


@pytest.fixture(params=["in-process", "process", "process-async"])
def make_client(
    request: pytest.FixtureRequest, make_args: Callable[..., EngineArgs], run_dir: Path
) -> Iterator[MakeClient]:
    made: list[EngineCoreClient] = []

    def make(**scripted: Any) -> EngineCoreClient:
        args = make_args(**scripted)
        if request.param == "in-process":
            made.append(InprocClient(args))
        elif request.param == "process":
            made.append(MPClient(args, run_dir))
        else:
            made.append(FromOrdinaryCode(replace(args, async_scheduling=True), run_dir))
        return made[-1]

    yield make
    for client in made:
        client.shutdown()
        if isinstance(client, FromOrdinaryCode):
            client.close()


@pytest.fixture
def make_mp(make_args: Callable[..., EngineArgs], run_dir: Path) -> Iterator[Callable[..., MPClient]]:
    made: list[MPClient] = []

    def make(**scripted: Any) -> MPClient:
        made.append(MPClient(make_args(**scripted), run_dir))
        return made[-1]

    yield make
    for client in made:
        client.shutdown()


def make_add(request_id: str, prompt: bytes = b"hello", **params: Any) -> AddRequest:
    params.setdefault("max_tokens", 8)
    return AddRequest(request_id, list(prompt), SamplingParams(**params), 0.0)


def finish(client: EngineCoreClient, *request_ids: str) -> dict[str, EngineOutput]:
    """Collects outputs until these have finished; one value a request, with all its tokens."""
    done: dict[str, EngineOutput] = {}
    tokens: dict[str, list[int]] = {}
    while not done.keys() >= set(request_ids):
        for output in client.get_outputs(30.0).outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                whole = {"new_token_ids": tokens[output.request_id], "start": None}  # times are of no interest
                done[output.request_id] = msgspec.structs.replace(output, **whole)
    return done


def test_requests_run_to_their_ends(make_client: MakeClient, make_args: Callable[..., EngineArgs]) -> None:
    client = make_client(replies={"hello": "Hi 😀"})
    requests = [make_add("a"), *(make_add(f"r{size}", b"x" * size, max_tokens=size) for size in range(1, 20))]
    for request in requests:
        client.add(request)
    done = finish(client, *(request.request_id for request in requests))
    assert bytes(done["a"].new_token_ids[:-1]).decode() == "Hi 😀"
    assert done["a"].finish_reason is FinishReason.STOP
    oracle = InprocClient(make_args(replies={"hello": "Hi 😀"}))
    for request in requests:
        oracle.add(request)
        assert finish(oracle, request.request_id)[request.request_id] == done[request.request_id]


def test_a_refused_request_fails_alone(make_client: MakeClient) -> None:
    client = make_client()
    client.add(make_add("good"))
    client.add(make_add("empty", b""))
    client.add(make_add("long", b"x" * 64))
    done = finish(client, "good", "empty", "long")
    assert done["good"].finish_reason is FinishReason.LENGTH
    assert done["empty"].finish_reason is done["long"].finish_reason is FinishReason.ERROR
    assert "empty" in str(done["empty"].error)
    assert "prompt is too long" in str(done["long"].error)


def test_a_request_that_breaks_in_a_step_fails_alone(make_client: MakeClient) -> None:
    client = make_client(breaks="broken")
    for name, prompt in (("good", b"hello"), ("bad", b"broken"), ("late", b"also good")):
        client.add(make_add(name, prompt))
    done = finish(client, "good", "bad", "late")
    assert (done["bad"].finish_reason, done["bad"].new_token_ids) == (FinishReason.ERROR, [])
    assert "scripted failure of one request" in str(done["bad"].error)
    assert {done[name].finish_reason for name in ("good", "late")} == {FinishReason.LENGTH}
    stats = client.call("stats")
    assert (stats["running"], stats["blocks_free"]) == (0, stats["blocks_total"])


def test_an_abort_does_not_reach_a_request_that_comes_after_it(make_client: MakeClient) -> None:
    client = make_client()
    client.abort(["a"])
    client.add(make_add("a"))
    assert finish(client, "a")["a"].finish_reason is FinishReason.LENGTH


def test_an_abort_on_the_heels_of_its_request(make_client: MakeClient) -> None:
    """Whichever is first, each ends once, and nothing of it stays."""
    client = make_client()
    for round_ in range(50):
        client.add(make_add(f"r{round_}", b"hello" * (1 + round_ % 9), max_tokens=15))
        client.abort([f"r{round_}"])
    client.add(make_add("last"))
    done = finish(client, *(f"r{round_}" for round_ in range(50)), "last")
    assert {output.finish_reason for output in done.values()} <= {FinishReason.ABORT, FinishReason.LENGTH}
    stats = client.call("stats")
    assert (stats["running"], stats["waiting"], stats["blocks_free"]) == (0, 0, stats["blocks_total"])


def test_abort_is_idempotent_and_gives_blocks_back(make_client: MakeClient) -> None:
    client = make_client(delay_s=0.01)
    client.add(make_add("a", max_tokens=50))
    client.add(make_add("b"))
    client.get_outputs(30.0)
    client.abort(["a", "unknown"])
    client.abort(["a", "b"])
    done = finish(client, "a", "b")
    assert done["a"].finish_reason is FinishReason.ABORT
    client.abort(["a"])
    stats = client.call("stats")
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["blocks_free"] == stats["blocks_total"]


def test_control_calls(make_client: MakeClient) -> None:
    client = make_client()
    assert client.call("stats")["blocks_total"] == 511
    assert client.call("reset_prefix_cache") is True
    with pytest.raises(EngineError, match="no_such_call"):
        client.call("no_such_call")
    with pytest.raises(EngineError, match="stats"):
        client.call("stats", "one argument too many")


@pytest.mark.parametrize(("mode", "length"), [("wait", 8), ("abort", 0)])
def test_a_pause_is_answered_when_what_it_waits_for_is_done(make_client: MakeClient, mode: str, length: int) -> None:
    client = make_client(delay_s=0.01)
    client.add(make_add("before"))
    if mode == "wait":
        client.get_outputs(30.0)  # it has begun
        length -= 1
    assert client.call("pause", mode) is True
    client.add(make_add("after"))
    assert client.call("is_paused") is True
    assert client.call("stats")["waiting"] == 1
    assert client.call("stats")["running"] == 0
    before = finish(client, "before")["before"]
    assert client.call("resume") is True
    assert len(finish(client, "after")["after"].new_token_ids) == 8
    assert before.finish_reason is (FinishReason.LENGTH if mode == "wait" else FinishReason.ABORT)
    assert len(before.new_token_ids) == length or mode == "abort"


async def test_a_paused_engine_ends_in_order(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    """What it was told to keep is aborted, and nobody waits for it."""
    client = await AsyncMPClient.start(make_args(), run_dir)
    await client.call("pause", "keep")
    await client.add(make_add("kept"))
    await client.call("stats")
    stopping = asyncio.create_task(client.shutdown(drain_s=600.0))
    assert [output.finish_reason for output in (await client.get_outputs()).outputs] == [FinishReason.ABORT]
    await stopping
    assert "exit code 0" in str(client.death)


def test_outputs_that_come_during_a_call_are_kept(make_client: MakeClient) -> None:
    client = make_client()
    client.add(make_add("a"))
    client.call("stats")
    assert len(finish(client, "a")["a"].new_token_ids) == 8


def test_a_fatal_error_is_told_to_everybody(make_client: MakeClient) -> None:
    client = make_client(fail_at_step=3)
    client.add(make_add("a"))
    with pytest.raises(EngineDeadError, match="scripted failure at step 3"):
        finish(client, "a")
    for use in (lambda: client.add(make_add("b")), lambda: client.abort(["a"]), lambda: client.call("stats")):
        with pytest.raises(EngineDeadError):
            use()


def test_after_shutdown_everything_says_so(make_client: MakeClient) -> None:
    client = make_client()
    client.shutdown()
    client.shutdown()
    for use in (
        lambda: client.add(make_add("a")),
        lambda: client.abort(["a"]),
        lambda: client.call("stats"),
        client.get_outputs,
    ):
        with pytest.raises(EngineDeadError):
            use()


def test_a_failed_start_says_why(make_client: MakeClient) -> None:
    with pytest.raises(LoadError, match="weights are missing"):
        make_client(fail_at_start="weights are missing")
    with pytest.raises(ConfigError, match="blocks"):
        make_client(kv_blocks=3)


# What only processes have.


def test_an_abort_reaches_a_step_that_is_running(make_mp: Callable[..., MPClient]) -> None:
    """The step samples the request's last token; it still ends as aborted."""
    client = make_mp(delay_s=1.0)
    client.add(make_add("a", max_tokens=1))
    assert client.get_outputs(0.2).outputs == []
    client.abort(["a"])
    done = finish(client, "a")["a"]
    assert (done.finish_reason, done.new_token_ids) == (FinishReason.ABORT, [])


def test_sockets_and_start_file_are_private(make_mp: Callable[..., MPClient], run_dir: Path) -> None:
    client = make_mp()
    (folder,) = run_dir.iterdir()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}
    assert modes == {folder.name: 0o700, "in": 0o600, "out": 0o600, "start.json": 0o600}
    client.shutdown()
    assert list(run_dir.iterdir()) == []


@pytest.fixture
def send_raw() -> Iterator[Callable[[Path, list[bytes]], None]]:
    """Puts frames on a socket as a stranger who can open it would."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def send(path: Path, frames: list[bytes]) -> None:
        socket = context.socket(zmq.PUSH)
        socket.connect(f"ipc://{path}")
        socket.send_multipart(frames)
        socket.close(linger=5000)

    yield send
    context.destroy(linger=5000)


GARBAGE = [
    [b""],
    [b"\x80\x04\x95K\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."],
    [b"not", b"one", b"frame"],
    [b"\xff" * 1000],
    [b"\x91" * 100_000 + b"\x90"],  # nested too deeply
    [b"\x93\xa4call\x01" + b"\x91" * 100_000 + b"\x90"],
    [b"\xdd\xff\xff\xff\xff"],  # a list that claims four billion items
    [msgspec.msgpack.encode(["add", 7])],
    [msgspec.msgpack.encode(["nonsense", "x"])],
    [msgspec.msgpack.encode({"add": 1})],
]


@pytest.mark.parametrize("direction", ["in", "out"])
def test_garbage_on_a_socket_kills_nobody(
    make_mp: Callable[..., MPClient], run_dir: Path, send_raw: Callable[[Path, list[bytes]], None], direction: str
) -> None:
    client = make_mp()
    (folder,) = run_dir.iterdir()
    for frames in GARBAGE:
        send_raw(folder / direction, frames)
    client.add(make_add("a"))
    assert finish(client, "a")["a"].finish_reason is FinishReason.LENGTH


def test_a_request_that_cannot_be_decoded_is_answered(
    make_mp: Callable[..., MPClient], run_dir: Path, send_raw: Callable[[Path, list[bytes]], None]
) -> None:
    client = make_mp()
    (folder,) = run_dir.iterdir()
    send_raw(folder / "in", [msgspec.msgpack.encode(["add", "hot", [1], {"temperature": 9.0}, 0.0])])
    done = finish(client, "hot")["hot"]
    assert done.finish_reason is FinishReason.ERROR
    assert "temperature must be between 0 and 2" in str(done.error)


def test_an_engine_without_torch_loads_no_torch(make_mp: Callable[..., MPClient]) -> None:
    client = make_mp()
    assert "libtorch" not in Path(f"/proc/{client.ready.pid}/maps").read_text(encoding="utf-8")


def test_sigterm_aborts_and_ends_in_order(make_mp: Callable[..., MPClient]) -> None:
    client = make_mp(delay_s=0.02)
    client.add(make_add("a", max_tokens=50))
    client.get_outputs(30.0)
    os.kill(client.ready.pid, signal.SIGTERM)
    assert finish(client, "a")["a"].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineDeadError, match="exit code 0"):
        client.get_outputs(30.0)


def test_sigterm_wakes_an_idle_engine(make_mp: Callable[..., MPClient]) -> None:
    client = make_mp()
    os.kill(client.ready.pid, signal.SIGTERM)
    with pytest.raises(EngineDeadError, match="exit code 0"):
        client.get_outputs(30.0)


def test_ctrl_c_at_the_terminal_is_not_for_the_engine(make_mp: Callable[..., MPClient]) -> None:
    client = make_mp()
    os.kill(client.ready.pid, signal.SIGINT)
    client.add(make_add("a"))
    assert finish(client, "a")["a"].finish_reason is FinishReason.LENGTH


async def test_a_drain_lets_running_requests_finish(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    client = await AsyncMPClient.start(make_args(delay_s=0.05), run_dir)
    await client.add(make_add("a", max_tokens=10))
    first = (await client.get_outputs()).outputs
    stopping = asyncio.create_task(client.shutdown(drain_s=30.0))
    await asyncio.sleep(0.1)
    await client.add(make_add("late"))
    outputs = list(first)
    with contextlib.suppress(EngineDeadError):
        while True:
            outputs += (await client.get_outputs()).outputs
    await stopping
    assert "exit code 0" in str(client.death)
    assert sum(len(output.new_token_ids) for output in outputs if output.request_id == "a") == 10
    assert [output.finish_reason for output in outputs if output.request_id == "late"] == [FinishReason.ABORT]


async def test_an_idle_engine_says_that_it_is_alive(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    client = await AsyncMPClient.start(make_args(), run_dir)
    before_s = client.last_heartbeat_s
    async with asyncio.timeout(30):
        while client.last_heartbeat_s == before_s:  # noqa: ASYNC110 - there is no event for what is only a time
            await asyncio.sleep(0.05)
    await client.shutdown()


async def test_a_start_that_takes_too_long_is_given_up(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    with pytest.raises(EngineDeadError, match=r"not ready after 0\.2 s"):
        await AsyncMPClient.start(make_args(load_s=60.0), run_dir, start_timeout_s=0.2)
    assert os.listdir(run_dir) == []


async def test_cancelling_a_start_ends_the_engine(
    make_args: Callable[..., EngineArgs], run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starting = asyncio.create_task(AsyncMPClient.start(make_args(load_s=60.0), run_dir))
    await asyncio.sleep(0.2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert os.listdir(run_dir) == []
    del starting
    gc.collect()
    assert caplog.text == ""  # an error that nobody looked at would be told here


def test_a_failed_step_in_this_process_leaves_nothing_open(
    make_args: Callable[..., EngineArgs], monkeypatch: pytest.MonkeyPatch
) -> None:
    shut_down: list[object] = []
    monkeypatch.setattr(ScriptedExecutor, "shutdown", lambda executor: shut_down.append(executor))
    client = InprocClient(make_args(fail_at_step=1))
    client.add(make_add("a"))
    with pytest.raises(EngineDeadError):
        client.get_outputs()
    client.shutdown()
    client.shutdown()
    assert len(shut_down) == 1


async def test_calls_end_when_the_reader_fails(
    make_args: Callable[..., EngineArgs], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even in the moment in which the engine is still there: nobody may begin to wait on a reader that has ended."""
    closing, may_close = threading.Event(), threading.Event()
    close = EngineLink.close

    def slow_close(link: EngineLink) -> None:
        closing.set()
        may_close.wait(10)
        close(link)

    def fail(link: EngineLink, timeout_s: float | None) -> None:
        raise MemoryError("planted")

    client = await AsyncMPClient.start(make_args(), run_dir)
    monkeypatch.setattr(EngineLink, "close", slow_close)
    monkeypatch.setattr(EngineLink, "receive", fail)
    await client.abort(["makes it"])
    try:
        async with asyncio.timeout(30):
            with contextlib.suppress(EngineDeadError):
                await client.call("stats")  # what it answers wakes the reader, which then fails
            await asyncio.to_thread(closing.wait)
            with pytest.raises(EngineDeadError, match="planted"):
                await client.call("stats")
            with pytest.raises(EngineDeadError, match="planted"):
                await client.add(make_add("a"))
    finally:
        may_close.set()
        await client.shutdown()
    assert os.listdir(run_dir) == []


async def test_a_cancelled_shutdown_ends_the_engine(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    client = await AsyncMPClient.start(make_args(delay_s=0.05), run_dir)
    await client.add(make_add("a", max_tokens=50))
    await client.get_outputs()
    stopping = asyncio.create_task(client.shutdown(drain_s=1000.0))
    await asyncio.sleep(0.05)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    async with asyncio.timeout(10):
        assert "SIGKILL" in str(await client.wait_dead())


def test_garbage_in_place_of_the_hello_is_a_failed_start(
    make_args: Callable[..., EngineArgs], run_dir: Path, send_raw: Callable[[Path, list[bytes]], None]
) -> None:
    link = EngineLink(make_args(load_s=60.0), run_dir)
    send_raw(link.process.paths.output_socket, [b"\x91nonsense"])
    with pytest.raises(EngineDeadError, match="cannot be read"):
        link.wait_ready(30.0)
    link.close()
    assert os.listdir(run_dir) == []


def test_a_failing_listener_does_not_stop_the_log(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    lines: list[str] = []

    def listen(line: str) -> None:
        lines.append(line)
        raise RuntimeError("planted")

    client = MPClient(make_args(), run_dir, on_line=listen)
    client.shutdown()
    assert any("ready after" in line for line in lines)


def test_what_the_engine_prints_is_passed_on(make_args: Callable[..., EngineArgs], run_dir: Path) -> None:
    lines: list[str] = []
    client = MPClient(make_args(), run_dir, on_line=lines.append)
    client.shutdown()
    assert any("ready after" in line for line in lines)


def test_a_run_directory_that_is_too_long_is_refused(make_args: Callable[..., EngineArgs], tmp_path: Path) -> None:
    run_dir = tmp_path / ("x" * 100)
    with pytest.raises(ConfigError, match=r"too long.*107"):
        MPClient(make_args(), run_dir)
    assert list(run_dir.iterdir()) == []
