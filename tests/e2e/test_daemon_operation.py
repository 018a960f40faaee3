"""A daemon and the commands of those who look after it: reload, config, doctor, support bundle."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

INFERD = str(Path(sys.executable).parent / "inferd")
Serve = Callable[..., Any]
Inferd = Callable[..., subprocess.CompletedProcess[str]]
PROMPT = "the secret recipe of aunt Olga: France"


def wait_for(log: Path, text: str) -> str:
    """The log, once it holds `text`."""
    for _ in range(600):
        if text in (said := log.read_text()):
            return said
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came:\n{log.read_text()}")


@pytest.fixture
def config(inferd_environment: dict[str, str], tmp_path: Path) -> Path:
    path = tmp_path / ".config/inferd/inferd.toml"
    path.parent.mkdir(parents=True)
    path.write_text("")
    return path


def test_settings_change_under_a_running_daemon(serve: Serve, config: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    served = serve(log=log)
    body = {"model": "tiny", "prompt": "x"}
    config.write_text("max_open_requests = 1\nlog_level = 'debug'\nport = 4700\nhead_limit_bytes = 20000\n")
    served.process.send_signal(signal.SIGHUP)
    said = wait_for(log, "needs a restart: head_limit_bytes\n")  # and not port: the option wins, as before
    assert "new values of: max_open_requests, log_level\n" in said
    assert httpx.post(f"{served.address}/v1/completions", json=body, trust_env=False).status_code == 200
    config.write_text("max_open_requests = 0\n")
    served.process.send_signal(signal.SIGHUP)
    wait_for(log, "the settings stay as they were, because the new ones cannot be used: max_open_requests")
    assert httpx.get(f"{served.address}/health", trust_env=False).status_code == 200
    served.process.terminate()
    assert served.process.wait(timeout=20) == 0


async def test_what_takes_effect_at_once(start_daemon: Any, tmp_path: Path) -> None:
    daemon = await start_daemon(scripted={"delay_s": 0.005})
    state = daemon.state
    before = state.planner.needs(daemon.model)
    changes = {"keep_alive": "3s", "max_open_requests": 1, "max_loaded_models": 1}
    state.live.take(state.settings.model_copy(update=changes))
    assert before.keep_alive_s == 600
    assert state.planner.needs(daemon.model).keep_alive_s == 3
    assert state.planner.capacity()["slots"] == 1
    body = {"model": daemon.model, "prompt": "x", "stream": True, "max_tokens": 500, "ignore_eos": True}
    async with daemon.http.stream("POST", "/v1/completions", json=body) as stream:
        await anext(stream.aiter_lines())
        assert (await daemon.complete("x")).status_code == 429


def test_the_doctor_and_the_bundle_of_a_running_daemon(serve: Serve, inferd: Inferd, tmp_path: Path) -> None:
    served = serve("--set", "log_level=debug")
    options = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}
    url = f"{served.address}/v1/chat/completions"
    assert httpx.post(url, json=options, trust_env=False).status_code == 200
    assert httpx.post(url, json={**options, "temperature": 99}, trust_env=False).status_code == 400
    config = tmp_path / "this.toml"
    config.write_text(f"port = {served.port}\n")
    done = inferd("doctor", "--json", "--config", str(config))
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert findings["port"]["text"].startswith("inferd ")
    assert findings["database"]["status"] == "ok"
    assert done.returncode == any(finding["status"] == "failure" for finding in findings.values())

    done = inferd("support-bundle", str(tmp_path / "b.tar.gz"), "--config", str(config))
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        texts = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    assert all(name.removeprefix("b/") in done.stdout for name in texts)
    assert "POST '/v1/chat/completions' 200" in texts["b/log.jsonl"]
    assert "ready after" in texts["b/log.jsonl"], "lines of the engine are there too"
    key = (tmp_path / "home/admin.key").read_text().strip()
    for text in texts.values():
        assert "Olga" not in text
        assert key not in text
        assert "Paris" not in text


def test_the_doctor_names_what_is_wrong(inferd: Inferd, inferd_environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    inferd_environment["INFERD_MEMORY_BUDGET_BYTES"] = str(2**60)
    done = inferd("doctor")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    failed = [line.split("  ")[1] for line in lines if line.startswith("FAIL")]
    assert {"memory", "permissions of home"} <= set(failed)
    assert any("→ Set memory_budget_bytes" in line for line in lines)
    inferd_environment["INFERD_PROT"] = "1"
    done = inferd("doctor")
    assert done.returncode == 1
    assert "did you mean 'INFERD_PORT'" in done.stdout


def test_config_says_where_each_value_comes_from(
    inferd: Inferd, inferd_environment: dict[str, str], config: Path, tmp_path: Path
) -> None:
    config.write_text("drain_s = 4\n[engine]\ndtype = 'float32'\n")
    inferd_environment["INFERD_PORT"] = "4701"
    rows = {row["name"]: row for row in json.loads(inferd("config", "--json").stdout)}
    assert rows["drain_s"] == {"name": "drain_s", "value": "4", "origin": str(config)}
    assert rows["engine.dtype"]["origin"] == str(config)
    assert rows["port"]["origin"] == "environment (INFERD_PORT)"
    assert rows["host"]["origin"] == "default"
    assert "drain_s" in inferd("config", "--changed").stdout
    assert "host" not in inferd("config", "--changed").stdout
    assert f"{config}  is read" in inferd("config", "path").stdout
    assert inferd("config", "check", str(config)).returncode == 0
    config.write_text("prot = 4\n")
    refused = inferd("config", "check", str(config))
    assert refused.returncode == 78
    assert "did you mean 'port'" in refused.stderr
    assert inferd("config").returncode == 78


def test_a_file_is_checked_whatever_the_environment_says(
    inferd: Inferd, inferd_environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text("port = 'x'\n")
    inferd_environment["INFERD_PORT"] = "4701"
    assert inferd("config", "check", str(tmp_path / "x.toml")).returncode == 78


AT_A_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def test_a_terminal_that_is_closed_ends_the_daemon(model_folder: Path, inferd_environment: dict[str, str]) -> None:
    """Its SIGHUP is no wish for a reload: nobody would be left to see the daemon, or to end it."""
    screen, terminal = pty.openpty()
    options = ["--port", "0", "--set", "engine.executor=scripted", "--set", "engine.block_size=4"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", AT_A_TERMINAL, INFERD, "serve", *options, "--model", str(model_folder)],
        env=inferd_environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""
    while b"inferd run" not in shown:
        shown += os.read(screen, 4096)
    os.close(screen)
    assert process.wait(timeout=20) == 0
