"""`inferd run`, and the verbs beside a daemon: what is asked for, what is said about the answer, and how it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.testing.model_folder import make_model_folder

Serve = Callable[..., Any]  # the conftest's; test folders are no packages
Inferd = Callable[..., subprocess.CompletedProcess[str]]
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
COMMAND = str(Path(sys.executable).parent / "inferd")


@pytest.fixture
def parrot(tmp_path: Path) -> str:
    """A folder with a model that answers long, and briefly to a pirate."""
    replies = {"pirate": "Arr.", "": "word " * 300}
    return str(make_model_folder(tmp_path / "parrot", replies=replies, kv_blocks=1025))


def test_a_cut_answer_is_said_to_be_cut(serve: Serve, inferd: Inferd, parrot: str) -> None:
    port = str(serve("--model", parrot).port)
    done = inferd("run", "--port", port, "parrot", "hello", "--max-tokens", "8")
    assert done.stdout == "word wor\n"
    assert done.stderr == ("inferd: the answer was cut after 8 tokens; a larger --max-tokens, or none, lets it go on\n")
    done = inferd("run", "--port", port, "parrot", "x" * 1800)
    assert "fills the model's context" in done.stderr
    done = inferd("run", "--port", port, "parrot", "x" * 1800, "--max-tokens", "1000")
    assert "max_tokens lowered from 1000 to " in done.stderr
    assert "fills the model's context" in done.stderr
    done = inferd("run", "--port", port, "parrot", "hello")
    assert (done.stdout, done.stderr, done.returncode) == ("word " * 300 + "\n", "", 0)


def test_options_reach_the_model(serve: Serve, inferd: Inferd, parrot: str) -> None:
    port = str(serve("--model", parrot).port)
    options = ["--system", "You are a pirate.", "--temperature", "0.5", "--top-p", "0.9", "--seed", "3"]
    assert inferd("run", "--port", port, "parrot", "hello", *options).stdout == "Arr.\n"
    wrong = inferd("run", "--port", port, "parrot", "hello", "--temperature", "9")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == "inferd: temperature must be between 0 and 2, got 9\n"


def test_what_cannot_be_asked_is_said_in_one_place(serve: Serve, inferd: Inferd, parrot: str) -> None:
    port = str(serve("--model", parrot).port)
    unknown = inferd("run", "--port", port, "nope", "hello")
    assert (unknown.returncode, unknown.stdout) == (4, "")
    for words, text in ((["parrot", " "], ""), (["parrot"], " \n")):
        empty = inferd("run", "--port", port, *words, text=text)
        assert (empty.returncode, empty.stdout) == (2, "")
        assert "the question is empty" in empty.stderr


def test_a_reader_that_has_seen_enough_ends_the_answer_quietly(
    serve: Serve, inferd_environment: dict[str, str], tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path / "slow", replies={"": "word " * 300}, kv_blocks=1025, delay_s=0.01)
    log = tmp_path / "log"
    port = str(serve("--model", str(folder), log=log).port)
    command = [COMMAND, "run", "--port", port, "slow", "hello"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=inferd_environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == b"word"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 141
    until_logged(log, "POST '/v1/chat/completions' 499")  # the client left: the rest is not computed


def until_logged(log: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in log.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline, f"{text} is not in the log"
        time.sleep(0.05)


def test_the_version_is_an_option_too(inferd: Inferd) -> None:
    assert inferd("--version").stdout == inferd("version").stdout


def test_a_served_model_is_not_removed(serve: Serve, inferd: Inferd, tmp_path: Path) -> None:
    folders = [make_model_folder(tmp_path / name, replies={"": "hi"}) for name in ("one", "two")]
    for folder in folders:
        (folder / "model.safetensors").write_bytes(b"weights")
        assert inferd("pull", str(folder)).returncode == 0
    port = str(serve("--model", "one").port)
    refused = inferd("rm", "one", "--port", port)
    assert (refused.returncode, refused.stderr) == (
        5,
        "inferd: one is in use (ready); `inferd unload one` ends that.\n",
    )
    assert inferd("rm", "one", "--port", "9").returncode == 5  # nobody answers there, but the library knows
    removed = inferd("rm", "two", "--port", port)
    assert removed.returncode == 0, removed.stderr
    assert inferd("rm", "two", "--port", port).returncode == 4
    assert inferd("run", "--port", port, "one", "hello", "--max-tokens", "3").stdout.strip()
    assert inferd("unload", "one", "--port", port).returncode == 0
    assert inferd("rm", "one", "--port", port).returncode == 0


def test_phases_of_a_start_are_told_in_order_and_lines_have_one_time(
    serve: Serve, inferd_environment: dict[str, str], tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path / "fresh", replies={"": "hi"})
    (folder / "model.safetensors").write_bytes(b"weights")
    log = tmp_path / "log"
    served = serve("--model", f"file:{folder}", log=log)
    lines = log.read_text(encoding="utf-8").splitlines()
    phases = [line.split()[0] for line in lines if not TIME.match(line)]
    assert list(dict.fromkeys(phases)) == ["resolving", "verifying", "starting"]
    assert "inferd is ready: it serves fresh at" in served.greeting
    (ready,) = (line for line in lines if " inferd.engine: " in line)
    assert re.search(
        r"INFO +inferd\.engine: \[fresh\] ready after [\d.]+ s: \w+, a context of 2048 tokens, \d+ KV blocks of 4$",
        ready,
    )
    assert all(len(TIME.findall(line)) <= 1 for line in lines)
