"""What the doctor reads of a real machine: real folders, sockets and databases, broken for it."""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from inferd.appliance.doctor import software
from inferd.appliance.doctor.gpu import read_gpu
from inferd.appliance.doctor.library import check_library, read_library
from inferd.appliance.doctor.machine import read_machine
from inferd.appliance.doctor.network import read_network
from inferd.appliance.doctor.places import check_places, read_place, read_places
from inferd.appliance.doctor.service import read_service
from inferd.appliance.library.library import DATABASE_NAME, Library
from inferd.appliance.library.migrations import MIGRATIONS, migrate


def statuses(findings: Iterator[object]) -> dict[str, str]:
    return {finding.check: finding.status for finding in findings}  # type: ignore[attr-defined]


def test_cards_and_device_files(tmp_path: Path) -> None:
    kinds = {"0": ("0x10de", "0x030200"), "1": ("0x10de", "0x040300"), "2": ("0x8086", "0x030000")}
    for name, (vendor, kind) in kinds.items():
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    facts = read_gpu(tmp_path)
    assert facts.num_cards == 1
    assert set(facts.missing_nodes) == {str(tmp_path / "dev" / name) for name in ("nvidiactl", "nvidia-uvm")}


def test_the_way_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    place = read_place("home", tmp_path / "open/a/b")
    assert [step.path for step in place.steps][-1] == tmp_path / "open"
    assert not place.exists
    assert place.steps[-1].mode & 0o002
    (tmp_path / "file").touch()
    place = read_place("home", tmp_path / "file/home")
    assert not place.steps[-1].is_folder


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_folder_that_is_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o600)
    assert not read_place("home", closed / "home").steps[-1].may_enter


def test_open_secrets(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    for name in ("admin.key", "library.db"):
        (home / name).touch(mode=0o600)
        (home / name).chmod(0o644)
    facts = read_places(home, tmp_path / "run", tmp_path / "cache")
    assert facts.open_secrets == (home / "admin.key",), "behind a closed door the database is safe"
    home.chmod(0o755)
    facts = read_places(home, tmp_path / "run", tmp_path / "cache")
    assert len(facts.open_secrets) == 2
    assert statuses(check_places(facts))["permissions of home"] == "failure"


def test_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        holder.settimeout(0)
        facts = read_network("127.0.0.1", port)
        assert f"(pid {os.getpid()})" in facts.holder
    assert read_network("127.0.0.1", port) == type(facts)("127.0.0.1", port)
    assert read_network("192.0.2.1", 4633).bind_error


def test_a_damaged_database(inferd_home: Path) -> None:
    with Library.open(inferd_home) as library, library.database.writing() as db:
        db.conn.executemany("INSERT INTO model_facts VALUES (?, ?)", [(f"m{i}", "{}" * 50) for i in range(500)])
    database = inferd_home / DATABASE_NAME
    assert statuses(check_library(read_library(inferd_home)))["database"] == "ok"
    content = bytearray(database.read_bytes())
    size = int.from_bytes(content[16:18], "big")
    content[-2 * size :] = b"\xff" * (2 * size)
    database.write_bytes(content)
    facts = read_library(inferd_home)
    assert statuses(check_library(facts))["database"] == "failure"
    database.write_bytes(b"this is no database at all, whatever it is called")
    assert "not a database" in read_library(inferd_home).error


def test_an_old_schema_and_a_newer_one(inferd_home: Path) -> None:
    inferd_home.mkdir()
    with closing(sqlite3.connect(inferd_home / DATABASE_NAME)) as connection:
        migrate(Database(connection), MIGRATIONS[:2])
    assert len(read_library(inferd_home).pending) == len(MIGRATIONS) - 2
    assert read_library(inferd_home).pending, "looking has changed nothing"
    Library.open(inferd_home).close()
    with closing(sqlite3.connect(inferd_home / DATABASE_NAME)) as connection, connection:
        connection.execute("INSERT INTO migrations VALUES ('m999_future', 0)")
    assert "newer inferd" in read_library(inferd_home).schema_error


def test_models_whose_files_are_gone(inferd_home: Path) -> None:
    with Library.open(inferd_home) as library, library.database.writing() as db:
        db.conn.execute(
            "INSERT INTO models VALUES ('gone', 'file:/x', NULL, 'gguf', 'L', 'models/gone', 1, NULL, 8, 1)"
        )
    facts = read_library(inferd_home)
    assert (facts.num_models, facts.lost) == (1, ("gone",))


def test_unfinished_downloads(inferd_home: Path) -> None:
    staging = inferd_home / "models/.partial/smol-0123456789ab"
    staging.mkdir(parents=True)
    (staging / "part").write_bytes(b"x" * 100)
    (pull,) = read_library(inferd_home).unfinished
    assert pull.num_bytes == 100


def test_leftovers_and_units(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for name in ("d-dead", "d-alive"):
        (run_dir / name).mkdir(parents=True)
        (run_dir / name / "lock").touch()
    with (run_dir / "d-alive/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_service(run_dir, tmp_path / "config", tmp_path).leftovers == (run_dir / "d-dead",)
    weak, strong = tmp_path / "usr/local/lib/systemd/system", tmp_path / "etc/systemd/system"
    for folder in (weak, strong / "inferd.service.d"):
        folder.mkdir(parents=True)
    (weak / "inferd.service").touch()
    (strong / "inferd.service.d/override.conf").touch()
    facts = read_service(run_dir, tmp_path / "config", tmp_path)
    assert (facts.units, facts.drop_ins) == (
        (weak / "inferd.service",),
        (strong / "inferd.service.d/override.conf",),
    )
    (strong / "inferd.service").touch()
    assert read_service(run_dir, tmp_path / "config", tmp_path).units == (
        strong / "inferd.service",
        weak / "inferd.service",
    )


def test_the_machine(tmp_path: Path) -> None:
    facts = read_machine(tmp_path / "a/b", memory_budget_bytes=None, num_ranks=1)
    assert facts.disk_free_bytes > 0
    assert facts.memory_total_bytes >= facts.memory_available_bytes > 0
    assert facts.now > facts.not_before


def test_the_engines_own_view() -> None:
    facts = software.read_software(num_gpus=0, kernels="torch", device="auto")
    assert facts.engine is not None, facts.engine_error
    assert facts.engine.torch.startswith("2.")
    assert "asks for it" in facts.engine.kernels[0]


def test_an_engine_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert software.ask_engine("auto") == (None, "exit code 1")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "/nowhere/python" in software.ask_engine("auto")[1]
