"""install.sh and uninstall.sh over a false root: what they write, that twice is once, and what they take away again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inferd.appliance.settings import check_file

PACKAGING = Path(__file__).parents[2] / "packaging"
VENV = Path(sys.executable).parent.parent  # has bin/inferd
Script = Callable[..., subprocess.CompletedProcess[str]]

# In the place of Python: makes something that looks like an environment, and notes what pip was asked for.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*)
    mkdir -p "$3/bin"
    touch "$3/pyvenv.cfg"
    printf '#!/bin/sh\\necho "$@" >> %s\\n' "$PIP_LOG" > "$3/bin/pip"
    printf '#!/bin/sh\\n' > "$3/bin/inferd"
    cp "$3/bin/inferd" "$3/bin/python"
    chmod +x "$3/bin/pip" "$3/bin/inferd" "$3/bin/python"
    ;;
esac
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def run(tmp_path: Path, root: Path) -> Script:
    def run(script: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "python").write_text(FAKE_PYTHON)
        (tmp_path / "python").chmod(0o755)
        kept = {"PATH": os.environ["PATH"], "HOME": "/home/me myself", "DESTDIR": str(root)}
        kept |= {"PROBE_ROOT": str(tmp_path / "machine"), "PIP_LOG": str(tmp_path / "pip.log"), **environment}
        return subprocess.run(
            ["sh", str(PACKAGING / script), *options], env=kept, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def files_below(root: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


SYSTEM_FILES = {
    "etc/inferd/inferd.toml",
    "usr/local/bin/inferd",
    "usr/local/lib/systemd/system/inferd.service",
    "usr/local/lib/sysusers.d/inferd.conf",
    "usr/local/lib/tmpfiles.d/inferd.conf",
}


def test_the_system_twice_and_away(run: Script, root: Path) -> None:
    first = run("install.sh", "--venv", str(VENV))
    assert first.returncode == 0, first.stderr
    before = files_below(root)
    assert set(before) == SYSTEM_FILES
    assert before["usr/local/bin/inferd"] == f"{VENV}/bin/inferd"
    unit = before["usr/local/lib/systemd/system/inferd.service"]
    assert f"ExecStart={VENV}/bin/inferd serve\n".encode() in unit
    settings = check_file(root / "etc/inferd/inferd.toml")
    assert (settings.home, settings.run_dir) == (Path("/var/lib/inferd"), Path("/run/inferd"))
    assert settings.model_fields_set <= {"home", "run_dir", "engine"}

    (root / "etc/inferd/inferd.toml").write_text("port = 4700\n")
    second = run("install.sh", "--venv", str(VENV))
    assert "everything was in place already" in second.stdout
    assert files_below(root) == before | {"etc/inferd/inferd.toml": b"port = 4700\n"}

    assert run("uninstall.sh").returncode == 0
    assert set(files_below(root)) == {"etc/inferd/inferd.toml"}
    (root / "var/lib/inferd").mkdir(parents=True)
    assert run("uninstall.sh", "--purge").returncode == 0
    assert not files_below(root)
    assert not (root / "var/lib/inferd").exists()


def test_one_users_own(run: Script, root: Path) -> None:
    done = run("install.sh", "--user", "--venv", str(VENV))
    assert done.returncode == 0, done.stderr
    home = "home/me myself"
    assert set(files_below(root)) == {
        f"{home}/.config/inferd/inferd.toml",
        f"{home}/.config/systemd/user/inferd.service",
        f"{home}/.local/bin/inferd",
    }
    (root / "home/me/precious").mkdir(parents=True)
    assert run("uninstall.sh", "--user", "--purge").returncode == 0
    assert not files_below(root)
    assert (root / "home/me/precious").exists(), "a space in a name is no end of it"


def test_an_environment_is_made_and_taken_away(run: Script, root: Path, tmp_path: Path) -> None:
    done = run("install.sh", "--python", str(tmp_path / "python"))
    assert done.returncode == 0, done.stderr
    assert (root / "opt/inferd/bin/inferd").exists()
    asked = (tmp_path / "pip.log").read_text()
    assert asked.startswith("install --quiet --upgrade --constraint ")
    assert "constraints.txt" in asked
    assert not (PACKAGING.parent / "build").exists()
    unit = (root / "usr/local/lib/systemd/system/inferd.service").read_text()
    assert unit == (PACKAGING / "systemd/inferd.service").read_text()
    run("install.sh", "--python", str(tmp_path / "python"))
    assert len((tmp_path / "pip.log").read_text().splitlines()) == 2, "an upgrade installs into the same environment"
    run("uninstall.sh")
    assert not (root / "opt/inferd").exists()


def test_what_is_no_environment_of_ours_stays(run: Script, root: Path) -> None:
    (root / "opt/inferd").mkdir(parents=True)
    (root / "opt/inferd/thesis.txt").write_text("x")
    (root / "usr/local/bin").mkdir(parents=True)
    (root / "usr/local/bin/inferd").write_text("somebody's script")
    assert "keeping" in run("install.sh", "--venv", str(VENV)).stdout
    run("uninstall.sh")
    assert {"opt/inferd/thesis.txt", "usr/local/bin/inferd"} <= set(files_below(root))


@pytest.mark.parametrize("mode", [[], ["--user"]])
def test_a_dry_run_writes_nothing(run: Script, root: Path, mode: list[str]) -> None:
    done = run("install.sh", "--dry-run", "--venv", str(VENV), *mode)
    assert done.returncode == 0, done.stderr
    assert "would run: install -m 644" in done.stdout
    assert not root.exists()
    run("install.sh", "--venv", str(VENV), *mode)
    before = files_below(root)
    assert "would run: rm -rf" in run("uninstall.sh", "--purge", "--dry-run", *mode).stdout
    assert files_below(root) == before


def test_a_unit_that_hides_ours_is_told(run: Script, root: Path) -> None:
    (root / "etc/systemd/system").mkdir(parents=True)
    (root / "etc/systemd/system/inferd.service").touch()
    assert "hides the unit" in run("install.sh", "--venv", str(VENV)).stdout


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({}, "no NVIDIA card: models run on the processor"),
        ({"sys/bus/pci/devices/0/vendor": "0x10de", "sys/bus/pci/devices/0/class": "0x030200"}, "but no driver"),
        ({"sys/bus/pci/devices/0/vendor": "0x10de", "sys/bus/pci/devices/0/class": "0x040300"}, "no NVIDIA card"),
        (
            {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n"},
            "NVIDIA driver 580: fine\n/dev/nvidia-uvm is missing",
        ),
        (
            {
                "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1.05  Tue Sep 23\n",
                "dev/nvidia-uvm": "",
            },
            "NVIDIA driver 535: too old for CUDA 13",
        ),
        (
            {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1  Release\n"},
            "NVIDIA driver 570: too old",
        ),
    ],
)
def test_what_is_said_of_the_card(run: Script, tmp_path: Path, machine: dict[str, str], said: str) -> None:
    for name, text in machine.items():
        (tmp_path / "machine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "machine" / name).write_text(text)
    assert said in run("install.sh", "--dry-run", "--venv", str(VENV)).stdout


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--venv", "/nowhere"], 1, "has no bin/inferd"),
        (["--python", "/bin/false"], 1, "Python 3.11 to 3.13"),
        (["--frobnicate"], 2, "--dry-run"),
    ],
)
def test_refusals(run: Script, root: Path, options: list[str], code: int, said: str) -> None:
    done = run("install.sh", *options)
    assert done.returncode == code
    assert said in done.stderr
    assert not root.exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    subprocess.run(
        ["shellcheck", "-x", "packaging/install.sh", "packaging/uninstall.sh"], cwd=PACKAGING.parent, check=True
    )
