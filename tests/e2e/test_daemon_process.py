"""`inferd serve` as a process: what it prints, how it ends, and what it leaves behind."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from inferd.engine.testing.model_folder import make_model_folder

INFERD = str(Path(sys.executable).parent / "inferd")
SCRIPTED = ["--set", "engine.executor=scripted", "--set", "engine.block_size=4"]
GONE_S = 3.0


Serve = Callable[..., Any]  # the conftest's; test folders are no packages


def inferd(environment: dict[str, str], *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [INFERD, *words], env=environment, capture_output=True, text=True, timeout=60, input=text or "", check=False
    )


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


def test_it_says_what_to_copy_and_answers(serve: Serve) -> None:
    served = serve()
    assert all(word in served.greeting for word in ("curl ", "from openai import OpenAI", "inferd run", "tiny"))
    assert httpx.get(f"{served.address}/ready", trust_env=False).status_code == 200
    curl = next(line for line in served.greeting.splitlines() if line.lstrip().startswith("curl"))
    body = json.loads(curl.split("-d '")[1].rstrip("'"))
    url = curl.split()[1]
    answer = httpx.post(url, json=body, trust_env=False).json()
    assert answer["choices"][0]["message"]["content"] == "Paris."


def test_the_daemon_holds_no_torch(serve: Serve) -> None:
    served = serve()
    mapped = Path(f"/proc/{served.process.pid}/maps").read_text(encoding="utf-8")
    assert "libtorch" not in mapped


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_it_cleanly(
    serve: Serve, inferd_environment: dict[str, str], number: signal.Signals, exit_code: int
) -> None:
    served = serve()
    engines = served.children()
    assert engines
    served.process.send_signal(number)
    assert served.process.wait(timeout=20) == exit_code
    assert gone(engines, GONE_S)
    assert list(Path(inferd_environment["INFERD_RUN_DIR"]).iterdir()) == []


def test_a_killed_daemon_leaves_no_process(serve: Serve, inferd_environment: dict[str, str]) -> None:
    served = serve()
    engines = served.children()
    served.process.kill()
    served.process.wait()
    assert gone(engines, GONE_S)
    serve()  # and what it left on disk is in nobody's way
    left = Path(inferd_environment["INFERD_RUN_DIR"]).iterdir()
    assert sorted(path.name.partition("-")[0] for path in left) == ["admin", "d"]


def test_sockets_are_private(serve: Serve, inferd_environment: dict[str, str]) -> None:
    serve()
    run_dir = Path(inferd_environment["INFERD_RUN_DIR"])
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    modes = {path.name.partition("-")[0]: stat.S_IMODE(path.stat().st_mode) for path in run_dir.iterdir()}
    assert modes == {"admin": 0o600, "d": 0o700}


def test_only_the_api_listens(serve: Serve) -> None:
    served = serve()
    processes = [psutil.Process(served.process.pid), *served.children()]
    listening = [
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == [("127.0.0.1", served.port)]


def test_a_taken_port_names_its_holder(model_folder: Path, inferd_environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        done = inferd(inferd_environment, "serve", "--model", str(model_folder), "--port", port)
    assert done.returncode == 1
    assert f"port {port} of 127.0.0.1 is taken by" in done.stderr
    assert f"(pid {os.getpid()})" in done.stderr


LISTEN = (
    "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); print('up', flush=True); input()"
)


def test_the_holder_of_the_same_port_on_another_address_is_not_blamed(
    model_folder: Path, inferd_environment: dict[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        command = [sys.executable, "-P", "-c", LISTEN, "127.0.0.2", port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bystander:
            assert bystander.stdout is not None
            assert bystander.stdout.readline() == b"up\n"
            done = [
                inferd(inferd_environment, "serve", "--model", str(model_folder), "--host", host, "--port", port)
                for host in ("127.0.0.1", "127.0.0.2")
            ]
    assert [f"(pid {pid})" in one.stderr for pid, one in zip((os.getpid(), bystander.pid), done, strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("options", "exit_code", "said"),
    [
        (["--set", "kepalive_s=3"], 78, "keepalive_s"),
        (["--set", "engine.dtpye=float32"], 78, "dtype"),
        (["--set", "port"], 78, "KEY=VALUE"),
        (["--set", "port=1", "--set", "port.x=2"], 78, "port was given a value before"),
        (["--host", "0.0.0.0"], 78, "not a loopback address"),
        (["--port", "99999"], 78, "port"),
        (["--config", "/nowhere.toml"], 78, "/nowhere.toml"),
        (["--model", "nope"], 4, "nope"),
        (["--no-such-flag"], 2, "no-such-flag"),
        (["--set", "engine.block_size=4", "--set", "engine.max_model_len=999999"], 78, "max_model_len"),
    ],
    ids=str,
)
def test_what_keeps_it_from_serving(
    model_folder: Path, inferd_environment: dict[str, str], options: list[str], exit_code: int, said: str
) -> None:
    model = [] if "--model" in options else ["--model", str(model_folder)]
    done = inferd(inferd_environment, "serve", "--port", "0", "--set", "engine.executor=scripted", *model, *options)
    assert done.returncode == exit_code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_load_is_an_error(tmp_path: Path, inferd_environment: dict[str, str]) -> None:
    folder = make_model_folder(tmp_path / "broken", fail_at_start="tensor lm_head.weight is missing")
    done = inferd(inferd_environment, "serve", "--port", "0", *SCRIPTED, "--model", str(folder))
    assert done.returncode == 1
    assert "lm_head.weight is missing" in done.stderr


def test_run_answers_and_converses(serve: Serve, inferd_environment: dict[str, str]) -> None:
    port = str(serve().port)
    for words in (["tiny", "capital of France?"], ["capital of France?"]):
        done = inferd(inferd_environment, "run", "--port", port, *words)
        assert (done.returncode, done.stdout) == (0, "Paris.\n")
    piped = inferd(inferd_environment, "run", "--port", port, text="capital of France?")
    assert piped.stdout == "Paris.\n"
    assert inferd(inferd_environment, "run", "--port", port, "nope", "x").returncode == 4


class Terminal:
    """`inferd run` with a person before it."""

    def __init__(self, environment: dict[str, str], *words: str) -> None:
        self._screen, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [INFERD, "run", *words],
            env={**environment, "TERM": "dumb"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def read_until(self, end: str) -> str:
        shown = b""
        while end.encode() not in shown:
            assert select.select([self._screen], [], [], 30)[0], shown
            shown += os.read(self._screen, 4096)
        return shown.decode()

    def take_back(self) -> None:
        """Ctrl-C at the prompt. Python's line editing misses one that comes just before it waits for the next key."""
        self.process.send_signal(signal.SIGINT)
        while not select.select([self._screen], [], [], 2)[0]:
            self.process.send_signal(signal.SIGINT)
        self.read_until(">>> ")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


def test_a_conversation(serve: Serve, inferd_environment: dict[str, str], tmp_path: Path) -> None:
    lines = "a\u2028b\x85c"  # line ends to Unicode, text to a stream
    # The first key wins that is anywhere in the conversation.
    replies = {"France": "Paris.", "bell": "\x1b]0;mine\x07 ding", "lines": lines, "long": "word " * 300}
    folder = make_model_folder(tmp_path / "talker", replies=replies, kv_blocks=1025, delay_s=0.005)
    with closing(Terminal(inferd_environment, "--port", str(serve("--model", str(folder)).port))) as terminal:
        assert "Ctrl-D ends" in terminal.read_until(">>> ")
        terminal.type("half a question")
        terminal.read_until("half a question")
        terminal.take_back()
        terminal.type("long\r")
        terminal.read_until("word word")
        terminal.process.send_signal(signal.SIGINT)  # stops the answer, not the conversation
        terminal.read_until(">>> ")
        terminal.type("x" * 3000 + "\r")
        assert "prompt is too long" in terminal.read_until(">>> ")  # and the question is forgotten
        terminal.type("lines\r")
        assert "a\u2028b\\x85c" in terminal.read_until(">>> ")
        terminal.type("bell\r")
        assert "\\x1b]0;mine\\x07 ding" in terminal.read_until(">>> ")
        terminal.type("capital of France?\r")
        assert "Paris." in terminal.read_until(">>> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=20) == 0


def test_an_answer_that_breaks_off_is_to_be_tried_again(
    serve: Serve, inferd_environment: dict[str, str], tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path / "slow", replies={"long": "word " * 300}, kv_blocks=1025, delay_s=0.02)
    served = serve("--model", str(folder))
    engine = next(child for child in served.children() if "inferd-engine" in " ".join(child.cmdline()))
    command = [INFERD, "run", "--port", str(served.port), "slow", "long"]
    with subprocess.Popen(command, env=inferd_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"word"
        engine.kill()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 75, errors


def test_a_second_signal_does_not_wait_for_open_requests(serve: Serve, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "slow", kv_blocks=1025, delay_s=0.02)
    served = serve("--model", str(folder))
    body = {"model": "slow", "prompt": "x", "stream": True, "max_tokens": 1900, "ignore_eos": True}
    with httpx.stream("POST", f"{served.address}/v1/completions", json=body, trust_env=False) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        served.process.terminate()
        while httpx.get(f"{served.address}/ready", trust_env=False).status_code == 200:
            pass
        served.process.terminate()
        *_, last = (line for line in lines if line)
    assert last == "data: [DONE]"
    assert served.process.wait(timeout=20) == 0


def test_run_without_a_daemon(inferd_environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    done = inferd(inferd_environment, "run", "--port", port, "x", "y")
    assert done.returncode == 3
    assert "inferd serve" in done.stderr


def test_a_sleepy_client_cannot_hold_up_the_end(serve: Serve) -> None:
    served = serve()
    with socket.create_connection(("127.0.0.1", served.port)) as idle:
        idle.sendall(b"GET / HTTP/1.1\r\n")
        served.process.terminate()
        assert served.process.wait(timeout=20) == 0
