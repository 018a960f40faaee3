"""`inferd pull | ls | convert` as a shell sees them: output, exit codes, with and without a daemon."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from inferd.appliance import library_cli
from inferd.appliance.downloads.progress import PullProgress
from inferd.appliance.downloads.show import LineDisplay
from inferd.appliance.downloads.wire import PullEvent, PullFailure
from inferd.appliance.library.library import Library
from inferd.appliance.library.lock import in_service
from inferd.appliance.library.records import ModelRecord
from inferd.appliance.settings import load_settings
from inferd.engine.testing.model_folder import make_model_folder

RUN_CLI = "import typer; from inferd.appliance.library_cli import register; app = typer.Typer(); register(app); app()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_model_folder(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def unused_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Where no daemon listens, and none can start to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        monkeypatch.setenv("INFERD_PORT", str(port))
        yield port


@pytest.fixture
def run(unused_port: int) -> Callable[..., Any]:
    app = typer.Typer()
    library_cli.register(app)
    return lambda *arguments, text="": CliRunner().invoke(app, list(arguments), input=text)


def test_pull_and_list_without_a_daemon(run: Callable[..., Any], folder: Path) -> None:
    pulled = run("pull", str(folder))
    assert pulled.exit_code == 0, pulled.output
    assert pulled.stdout.startswith("tiny  ")
    listed = run("ls")
    header, row = listed.stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "FORMAT", "QUANT", "CONTEXT", "ALIASES", "SOURCE"]
    assert row.split()[0] == "tiny"
    assert row.endswith(f"file:{folder}")


def test_json_for_scripts(run: Callable[..., Any], folder: Path) -> None:
    assert json.loads(run("ls", "--json").stdout) == []
    record = json.loads(run("pull", str(folder), "--name", "mine", "--json").stdout)
    assert json.loads(run("ls", "--json").stdout) == [record]
    assert (record["id"], record["context_limit"]) == ("mine", 2048)


@pytest.fixture
def unfinished(inferd_home: Path) -> Path:
    """What a killed pull of org/x left."""
    Library.open(inferd_home).close()
    part = inferd_home / "models" / ".partial" / "org--x-0123456789ab" / "model"
    part.mkdir(parents=True)
    (part / "model.gguf.partial").write_bytes(bytes(2048))
    return part.parent


def test_an_unfinished_pull_is_named(run: Callable[..., Any], unfinished: Path) -> None:
    assert "Unfinished: org/x, 2.0 KiB; `inferd rm org/x` drops it." in run("ls").stderr
    (unfinished / "pull.json").write_text('{"model": "org/x", "source": "hf:org/X", "name": "org/x"}')
    told = run("ls", "--json")
    assert "`inferd pull hf:org/X --name org/x` goes on" in told.stderr
    assert json.loads(told.stdout) == []


def test_an_unfinished_pull_is_removed_by_its_name(run: Callable[..., Any], unfinished: Path) -> None:
    assert json.loads(run("rm", "org/x", "--json").stdout)["freed_bytes"] == 2048
    assert not unfinished.exists()
    assert run("rm", "org/x").exit_code == 4


def test_show_says_where_a_model_is(run: Callable[..., Any], folder: Path, inferd_home: Path) -> None:
    record = json.loads(run("pull", str(folder), "--json").stdout)
    place = str(inferd_home / record["path"])
    assert run("show", "TINY", "--path").stdout == place + "\n"
    assert json.loads(run("show", "tiny", "--json").stdout) == record | {"folder": place}
    assert place in run("show", "tiny").stdout
    assert run("show", "tyni").exit_code == 4


def test_rm_gives_back_what_only_the_library_has(run: Callable[..., Any], folder: Path, inferd_home: Path) -> None:
    record = json.loads(run("pull", str(folder), "--json").stdout)
    place = inferd_home / record["path"]
    own_bytes = sum(path.stat().st_size for path in place.iterdir() if path.stat().st_nlink == 1)
    (place / "model.safetensors").unlink()  # as if it had been copied
    (place / "model.safetensors").write_bytes(b"weights")
    removed = json.loads(run("rm", "tiny", "--json").stdout)
    assert removed["freed_bytes"] == own_bytes + len(b"weights")
    assert removed["shared_bytes"] == record["size_bytes"] - removed["freed_bytes"]
    assert not place.exists()
    assert (folder / "config.json").exists()
    assert json.loads(run("ls", "--json").stdout) == []


def test_rm_leaves_a_folder_alone_that_the_library_did_not_make(
    run: Callable[..., Any], folder: Path, inferd_home: Path
) -> None:
    record = msgspec.json.decode(run("pull", str(folder), "--json").stdout, type=ModelRecord)
    with Library.open(inferd_home) as library:
        library.remove(record.id)
        library.add(msgspec.structs.replace(record, path=str(folder)))
    done = run("rm", "tiny")
    assert (done.exit_code, str(folder) in done.stdout) == (0, True)
    assert (folder / "model.safetensors").exists()
    assert json.loads(run("ls", "--json").stdout) == []


def test_rm_does_not_go_behind_the_back_of_a_daemon(run: Callable[..., Any], folder: Path, inferd_home: Path) -> None:
    run("pull", str(folder))
    with in_service(inferd_home):
        done = run("rm", "tiny")
    assert done.exit_code == 5
    assert "--port" in done.stderr
    assert run("rm", "tiny").exit_code == 0


def test_rm_asks_at_a_terminal(run: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("pull", str(folder))
    monkeypatch.setattr("inferd.appliance.library_cli._is_person", lambda: True)
    assert run("rm", "tiny", text="n\n").exit_code == 1
    assert run("show", "tiny").exit_code == 0
    assert run("rm", "tiny", text="y\n").exit_code == 0
    run("pull", str(folder))
    assert run("rm", "tiny", "--yes").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "word"),
    [
        (["pull", "nonsense"], 2, "is not a source"),
        (["pull", "hf:../.."], 2, "ORG/NAME"),
        (["pull", "pypi:a", "--name", "../a"], 2, "name"),
        (["pull", "file:/absent.gguf"], 4, "/absent.gguf"),
        (["pull"], 2, "source"),
        (["ls", "--nonsense"], 2, "nonsense"),
    ],
)
def test_exit_codes(run: Callable[..., Any], arguments: list[str], exit_code: int, word: str) -> None:
    result = run(*arguments)
    assert result.exit_code == exit_code
    assert word in result.stderr.lower() or word in result.stderr
    assert result.stdout == ""


def test_a_bad_configuration_is_78(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_PROT", "1")
    assert run("ls").exit_code == 78


def test_a_pull_of_another_process_is_75(run: Callable[..., Any], inferd_home: Path, folder: Path) -> None:
    Library.open(inferd_home).close()
    fd = os.open(inferd_home / "library.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, b"4242")
    result = run("pull", str(folder))
    os.close(fd)
    assert result.exit_code == 75
    assert "process 4242" in result.stderr


def test_a_full_disk_is_7_and_an_unsupported_model_is_1(
    run: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Nope"]}))
    assert run("pull", str(folder)).exit_code == 1
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(os, "link", _no_links)
    monkeypatch.setattr("inferd.appliance.downloads.disk.HEADROOM", 1e18)
    assert run("pull", str(folder)).exit_code == 7


def _no_links(*args: Any, **kwargs: Any) -> None:
    raise PermissionError(1, "no links here")


@pytest.fixture
def answer_as_daemon(unused_port: int) -> Iterator[Callable[[bytes], None]]:
    """A daemon's admin socket that answers every request with these lines."""
    servers: list[socketserver.ThreadingUnixStreamServer] = []

    def answer(body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ncontent-length: {len(body)}\r\n\r\n"

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while self.rfile.readline() != b"\r\n":
                    pass
                self.wfile.write(head.encode() + body)

        path = load_settings().admin_socket
        path.parent.mkdir(parents=True, exist_ok=True)
        servers.append(socketserver.ThreadingUnixStreamServer(str(path), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()

    yield answer
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_running_daemon_does_the_pull(
    run: Callable[..., Any], answer_as_daemon: Callable[[bytes], None], folder: Path
) -> None:
    record = json.loads(run("pull", str(folder), "--json").stdout)
    progress = {"phase": "downloading", "file": "far", "bytes_done": 1, "bytes_total": 2}
    lines = [{"progress": progress}, {"model": record}]
    answer_as_daemon(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    result = run("pull", "pypi:anything")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "tiny")
    assert "downloading far 50 % of 2 B" in result.stderr


def test_what_the_daemon_fails_with_is_what_the_shell_gets(
    run: Callable[..., Any], answer_as_daemon: Callable[[bytes], None]
) -> None:
    answer_as_daemon(msgspec.json.encode(PullEvent(error=PullFailure("disk_full", "no room at all", 7, False))) + b"\n")
    result = run("pull", "pypi:anything")
    assert result.exit_code == 7
    assert "no room at all" in result.stderr


def test_convert_passes_its_folders_on_and_reports_failures(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run("convert", str(tmp_path / "absent"), str(tmp_path / "new"))
    assert result.exit_code == 1
    assert "absent" in result.stderr
    assert not (tmp_path / "new").exists()


def test_lines_of_progress_are_few() -> None:
    lines: list[str] = []
    report = LineDisplay(lines.append)
    for done in range(0, 1001):
        report(PullProgress("downloading", "a", done, 1000))
    report(PullProgress("importing", "a"))
    assert len(lines) == 12
    assert lines[-1] == "importing a"


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(folder: Path, inferd_home: Path, unused_port: int) -> None:
    command = [sys.executable, "-P", "-c", RUN_CLI, "pull", str(folder)]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\x1b" not in piped.stdout + piped.stderr
    assert "verifying" in piped.stderr
    screen, terminal = pty.openpty()
    shown = bytearray()
    reader = threading.Thread(target=_drain, args=(screen, shown))
    reader.start()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    environ.pop("NO_COLOR", None)
    subprocess.run([*command, "--name", "again"], stdout=subprocess.PIPE, stderr=terminal, env=environ, check=True)
    os.close(terminal)
    reader.join()
    os.close(screen)
    assert b"\x1b[" in shown


def _drain(screen: int, shown: bytearray) -> None:
    while True:
        try:
            data = os.read(screen, 4096)
        except OSError:  # the other end is closed
            return
        if not data:
            return
        shown.extend(data)
