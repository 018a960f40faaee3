"""A test plays systemd: it starts what the installed unit says, as the unit says it, and listens."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferd.engine.testing.model_folder import make_model_folder

PACKAGING = Path(__file__).parents[2] / "packaging"
VENV = Path(sys.executable).parent.parent
WATCHDOG_S = 0.5  # instead of the unit's, so that nobody has to wait for it
PATIENCE_S = 60


def read_unit(path: Path) -> dict[str, list[str]]:
    directives: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", "[")):
            directives[name].append(value)
    return directives


class Manager:
    """What systemd does with a unit of Type=notify, as far as the service can tell."""

    def __init__(self, unit: dict[str, list[str]], places: dict[str, Path], folder: Path) -> None:
        self.places = places
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = folder / "notify"
        self._listener.bind(str(address))
        self._listener.settimeout(PATIENCE_S)
        environment = dict(
            pair.split("=", 1) for line in unit["Environment"] for pair in shlex.split(self._expanded(line))
        )
        for name in ("State", "Cache", "Runtime", "Configuration"):
            for relative in " ".join(unit[f"{name}Directory"]).split():
                (places[name] / relative).mkdir(parents=True, exist_ok=True)
                (places[name] / relative).chmod(int("".join(unit.get(f"{name}DirectoryMode", ["755"])), 8))
        (command,) = unit["ExecStart"]
        log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            shlex.split(self._expanded(command)),
            env={
                "PATH": os.defpath,
                **environment,
                "NOTIFY_SOCKET": str(address),
                "WATCHDOG_USEC": str(int(WATCHDOG_S * 1_000_000)),
            },
            cwd=self._expanded(unit["WorkingDirectory"][0]),
            umask=int(unit["UMask"][0], 8),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        log.close()
        self._reload = shlex.split(unit["ExecReload"][0].replace("$MAINPID", str(self.process.pid)))

    def _expanded(self, text: str) -> str:
        specifiers = {"%S": "State", "%C": "Cache", "%t": "Runtime", "%E": "Configuration"}
        for specifier, name in specifiers.items():
            text = text.replace(specifier, str(self.places[name]))
        return text

    def hear(self) -> dict[str, str]:
        """The next message."""
        lines = self._listener.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def hear_until(self, wanted: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        while not wanted(message := self.hear()):
            pass
        return message

    def reload(self) -> None:
        subprocess.run(self._reload, check=True)

    def forget(self) -> None:
        """What has been said so far."""
        self._listener.setblocking(False)
        try:
            while True:
                self._listener.recv(4096)
        except BlockingIOError:
            self._listener.settimeout(PATIENCE_S)

    def is_silent_for(self, seconds: float) -> bool:
        self._listener.settimeout(seconds)
        try:
            self._listener.recv(4096)
        except TimeoutError:
            return True
        finally:
            self._listener.settimeout(PATIENCE_S)
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name, as the paths of sockets must be."""
    made = Path(tempfile.mkdtemp(prefix="inferd-sd-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Path:
    model = make_model_folder(tmp_path / "tiny", replies={"France": "Paris."}, kv_blocks=65)
    path = folder / "etc/inferd/inferd.toml"
    path.parent.mkdir(parents=True)
    path.write_text(f'port = 0\nmodel = "{model}"\n\n[engine]\nexecutor = "scripted"\nblock_size = 4\n')
    return path


@pytest.fixture
def manager(folder: Path, config: Path) -> Iterator[Manager]:
    installed = folder / "root"
    subprocess.run(
        ["sh", str(PACKAGING / "install.sh"), "--venv", str(VENV)],
        env={"PATH": os.environ["PATH"], "DESTDIR": str(installed)},
        check=True,
        capture_output=True,
    )
    unit = read_unit(installed / "usr/local/lib/systemd/system/inferd.service")
    assert (unit["Type"], unit["NotifyAccess"]) == (["notify"], ["main"])
    places = {"State": "lib", "Cache": "cache", "Runtime": "run", "Configuration": "etc"}
    for name in places.values():
        (folder / name).mkdir(exist_ok=True)
    manager = Manager(unit, {name: folder / place for name, place in places.items()}, folder)
    yield manager
    manager.close()


def test_a_service_from_start_to_end(manager: Manager, config: Path, folder: Path) -> None:
    ready = manager.hear_until(lambda message: "READY" in message)
    assert ready["STATUS"].startswith("listening on http://127.0.0.1:")
    serving = manager.hear_until(lambda message: message.get("STATUS", "").startswith("serving tiny"))["STATUS"]
    manager.hear_until(lambda message: "WATCHDOG" in message)

    good = config.read_text()
    config.write_text(good.replace("port = 0", "port = 0\ndrain_s = 5"))
    manager.reload()
    reloading = manager.hear_until(lambda message: "RELOADING" in message)
    assert int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    assert manager.hear_until(lambda message: "READY" in message)["STATUS"] == serving

    config.write_text("drian_s = 1\n")
    manager.reload()
    status = manager.hear_until(lambda message: "READY" in message)["STATUS"]
    assert status.startswith(f"{serving}; settings not reloaded: ")
    assert "did you mean 'drain_s'" in status
    manager.hear_until(lambda message: "WATCHDOG" in message)

    manager.process.terminate()
    stopping = manager.hear_until(lambda message: "STOPPING" in message)
    assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 5_000_000, "as long as it may take, by the settings of now"
    assert manager.process.wait(timeout=PATIENCE_S) == 0
    assert (folder / "lib/inferd/library.db").exists()
    assert (folder / "lib/inferd").stat().st_mode & 0o77 == 0


def test_a_daemon_that_stands_still_is_not_vouched_for(manager: Manager) -> None:
    manager.hear_until(lambda message: message.get("STATUS", "").startswith("serving tiny"))
    manager.process.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    manager.forget()
    assert manager.is_silent_for(3 * WATCHDOG_S)
    manager.process.send_signal(signal.SIGCONT)
    manager.hear_until(lambda message: "WATCHDOG" in message)


def test_a_configuration_that_cannot_be_used_is_not_tried_again(manager: Manager, config: Path, folder: Path) -> None:
    manager.process.kill()
    manager.process.wait()
    config.write_text("prot = 1\n")
    unit = read_unit(PACKAGING / "systemd/inferd.service")
    again = Manager(unit | {"ExecStart": [f"{VENV}/bin/inferd serve"]}, manager.places, config.parent)
    assert again.process.wait(timeout=PATIENCE_S) == int(unit["RestartPreventExitStatus"][0])
    again.close()
