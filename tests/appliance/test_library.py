"""The library: names, aliases, near names, threads and processes."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.appliance.library.errors import (
    DiskFull,
    InvalidName,
    LibraryBusy,
    LibraryUnreadable,
    ModelNotFound,
    NameTaken,
)
from inferd.appliance.library.library import Library
from inferd.appliance.library.lock import LibraryLock
from inferd.appliance.library.records import ModelFile, ModelRecord


def make_record(model_id: str = "tiny", **fields: Any) -> ModelRecord:
    defaults: dict[str, Any] = {
        "source": f"file:/models/{model_id}",
        "revision": None,
        "format": "gguf",
        "architecture": "LlamaForCausalLM",
        "path": f"models/{model_id.replace('/', '--')}-0123456789ab",
        "size_bytes": 3,
        "quantisation": "Q4_1",
        "context_limit": 2048,
        "created_at": 1,
        "files": (ModelFile("model.gguf", 3, "00" * 32),),
    }
    return ModelRecord(id=model_id, **(defaults | fields))


def test_what_was_added_is_found_again_after_a_restart(inferd_home: Path) -> None:
    record = make_record("org/tiny", aliases=("tiny", "t"), revision="abc")
    with Library.open(inferd_home) as library:
        stored = library.add(record)
    with Library.open(inferd_home) as library:
        assert library.list_models() == [stored]
        assert library.find("org/tiny") == library.find("t") == library.find("TINY") == stored
    assert set(stored.aliases) == {"tiny", "t"}
    assert msgspec.json.decode(msgspec.json.encode(stored), type=ModelRecord) == stored


def test_only_the_owner_may_look_into_the_home(inferd_home: Path) -> None:
    Library.open(inferd_home).close()
    assert stat.S_IMODE(inferd_home.stat().st_mode) == 0o700


def test_an_unknown_name_gets_near_names(library: Library) -> None:
    library.add(make_record("smollm2-135m-instruct", aliases=("smollm2",)))
    library.add(make_record("org/qwen3-0.6b"))
    with pytest.raises(ModelNotFound, match="did you mean smollm2") as caught:
        library.find("smolm2")
    assert caught.value.exit_code == 4
    with pytest.raises(ModelNotFound) as caught:
        library.find("qwen3-0.6")
    assert caught.value.near == ("org/qwen3-0.6b",)
    with pytest.raises(ModelNotFound, match="inferd ls") as caught:
        library.find("zzzzzz")
    assert caught.value.near == ()


@pytest.mark.parametrize("name", ["'; DROP TABLE models; --", "../tiny", "%", "", "\0"])
def test_hostile_names_are_only_unknown(library: Library, name: str) -> None:
    library.add(make_record())
    with pytest.raises(ModelNotFound):
        library.find(name)
    with pytest.raises(InvalidName):
        library.add(make_record(name))
    assert [record.id for record in library.list_models()] == ["tiny"]


def test_an_alias_keeps_meaning_what_it_meant(library: Library) -> None:
    library.add(make_record("a/tiny", aliases=("tiny",)))
    second = library.add(make_record("b/tiny", aliases=("tiny", "other", "a/tiny")))
    assert second.aliases == ("other",)
    assert library.find("tiny").id == "a/tiny"
    with pytest.raises(NameTaken):
        library.add(make_record("tiny"))


def test_replacing_a_model_keeps_its_aliases_and_drops_its_files(library: Library) -> None:
    library.add(make_record(aliases=("mine",)))
    new = library.add(make_record(path="models/tiny-fedcba987654", files=(ModelFile("x.gguf", 1, "11" * 32),)))
    assert new.aliases == ("mine",)
    assert library.list_models() == [new]


def test_removing_deletes_the_row_the_aliases_and_the_folder(library: Library) -> None:
    record = library.add(make_record(aliases=("mine",)))
    library.folder(record).mkdir()
    (library.folder(record) / "model.gguf").write_bytes(b"abc")
    assert library.remove("mine") == record
    assert library.list_models() == []
    assert not library.folder(record).exists()
    with pytest.raises(ModelNotFound):
        library.find("mine")
    assert library.add(make_record("mine")).id == "mine"  # the alias is free again


def test_the_folder_of_a_replaced_model_is_discarded_and_that_of_the_new_one_is_not(library: Library) -> None:
    old = library.add(make_record())
    library.discard("models/new-0123456789ab")
    library.add(make_record(path="models/new-0123456789ab"))
    assert library.discarded() == [old.path]
    library.erase(old.path)
    assert library.discarded() == []


@pytest.mark.parametrize("content", [b"no database, but long enough to be read as one" * 20, b"SQLite format 3\0"])
def test_a_damaged_database_is_named(inferd_home: Path, content: bytes) -> None:
    inferd_home.mkdir()
    (inferd_home / "library.db").write_bytes(content)
    with pytest.raises(LibraryUnreadable, match=r"library\.db.*move it away"):
        Library.open(inferd_home)
    assert (inferd_home / "library.db").read_bytes() == content


def test_a_home_on_a_full_disk_is_said_so(inferd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr("inferd.appliance.library.db.migrate", no_room)
    with pytest.raises(DiskFull, match=str(inferd_home)):
        Library.open(inferd_home)


def test_an_error_in_the_middle_of_a_write_leaves_the_old_row(library: Library) -> None:
    old = library.add(make_record())
    twice = (ModelFile("a", 1, "0"), ModelFile("a", 1, "0"))
    with pytest.raises(sqlite3.IntegrityError):
        library.add(make_record(files=twice, size_bytes=99))
    assert library.list_models() == [old]


def test_threads_write_and_read_at_once(library: Library) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(10):
                library.add(make_record(f"m{number}-{step}", created_at=step))
                library.find(f"m{number}-{step}")
                library.list_models()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(library.list_models()) == 40


def test_a_second_process_may_read_and_write_meanwhile(inferd_home: Path, library: Library) -> None:
    library.add(make_record())
    with Library.open(inferd_home) as other:
        other.add(make_record("second", created_at=2))
    assert [record.id for record in library.list_models()] == ["tiny", "second"]
    with sqlite3.connect(inferd_home / "library.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


HOLD_LOCK = """
import sys
from pathlib import Path
from inferd.appliance.library.lock import LibraryLock
with LibraryLock(Path(sys.argv[1])).held():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_names_the_process_that_holds_it_and_dies_with_it(inferd_home: Path, library: Library) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD_LOCK, str(inferd_home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LibraryBusy, match=str(holder.pid)) as caught, LibraryLock(inferd_home).held():
            pass
        assert caught.value.exit_code == 75
        holder.kill()
    with LibraryLock(inferd_home).held() as alone:
        assert alone


def test_threads_of_one_process_share_the_lock(inferd_home: Path, library: Library) -> None:
    lock = LibraryLock(inferd_home)
    with lock.held() as first, lock.held() as second:
        assert (first, second) == (True, False)
    with lock.held() as again:
        assert again


def test_the_lock_file_is_no_way_to_write_elsewhere(inferd_home: Path, library: Library, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    os.symlink(victim, inferd_home / "library.lock")
    with pytest.raises(OSError, match="symbolic"), LibraryLock(inferd_home).held():
        pass
    assert victim.read_text() == "mine"
