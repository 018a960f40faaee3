"""`file:` sources: linked or copied, never changed; and what a pull does beside other pulls."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.appliance.downloads.disk import Disk
from inferd.appliance.downloads.factory import build_pull_service
from inferd.appliance.downloads.progress import PullProgress
from inferd.appliance.downloads.stagings import Stagings
from inferd.appliance.library.errors import (
    DiskFull,
    InvalidSource,
    LibraryBusy,
    NameTaken,
    PullStopped,
    SourceNotFound,
    UnsupportedModel,
)
from inferd.appliance.library.library import Library
from inferd.appliance.library.lock import LibraryLock
from inferd.engine.testing.model_folder import make_model_folder

GGUF = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "My Model.Q8_0.gguf"
    path.write_bytes(GGUF)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_model_folder(tmp_path / "Tiny-Folder")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "modeling.py").write_text("raise SystemExit")
    return folder


@pytest.fixture
def service(library: Library, make_service: Callable[..., Any]) -> Any:
    return make_service(library)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mode, path.read_bytes()) for path in folder.iterdir() if path.is_file()}


def test_a_gguf_file_is_linked_and_stays_as_it_is(library: Library, service: Any, original: Path) -> None:
    before = snapshot(original.parent)
    record = service.pull(f"file:{original}")
    assert (record.id, record.quantisation, record.source) == ("my-model.q8_0", "Q8_0", f"file:{original}")
    ours = library.folder(record) / "model.gguf"
    assert ours.samefile(original)
    assert snapshot(original.parent) == before
    assert {file.name: file.sha256 for file in record.files}["model.gguf"] == hashlib.sha256(GGUF).hexdigest()


def test_a_file_without_a_telling_name_is_asked_how_it_is_quantised(
    library: Library, service: Any, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF + b" quant=Q5_K_M ")
    assert service.pull(f"file:{tmp_path / 'model.gguf'}").quantisation == "Q5_K_M"


def test_a_folder_is_taken_without_what_could_run(library: Library, service: Any, folder: Path) -> None:
    record = service.pull(str(folder))
    assert (record.id, record.format) == ("tiny-folder", "safetensors")
    assert {path.name for path in library.folder(record).iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_without_links_it_is_copied(
    library: Library, service: Any, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", no_links)
    seen: list[PullProgress] = []
    ours = library.folder(service.pull(str(original), seen.append)) / "model.gguf"
    assert not ours.samefile(original)
    assert ours.read_bytes() == GGUF
    assert any(progress.phase == "downloading" for progress in seen)


def test_a_copy_that_does_not_fit_is_refused(
    library: Library, make_service: Callable[..., Any], original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(DiskFull, match=r"model\.gguf needs"):
        make_service(library, disk=Disk(free_bytes=lambda folder: 100)).pull(str(original))
    assert library.list_models() == []


def test_links_as_a_hubs_cache_has_them_are_followed(
    library: Library, service: Any, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cached-model"
    cache.mkdir()
    for path in folder.iterdir():
        (cache / path.name).symlink_to(path)
    weights = library.folder(service.pull(str(cache))) / "model.safetensors"
    assert not weights.is_symlink()
    assert weights.read_bytes() == b"weights"


def test_what_is_no_model_is_refused(service: Any, library: Library, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="no file or folder"):
        service.pull(f"file:{tmp_path}/absent.gguf")
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(InvalidSource, match="neither a GGUF file nor a folder"):
        service.pull(f"file:{tmp_path}/x.txt")
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(UnsupportedModel, match="inferd convert"):
        service.pull(f"file:{tmp_path}/x.bin")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InvalidSource, match="regular"):
        service.pull(f"file:{tmp_path}/pipe.gguf")
    assert library.list_models() == []


def test_a_folder_of_pickles_is_refused_naming_convert(service: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="inferd convert"):
        service.pull(str(folder))


def test_a_file_that_is_no_gguf_is_refused_by_the_real_importer(library: Library, original: Path) -> None:
    original.write_bytes(b"GGUF but not really")
    with pytest.raises(UnsupportedModel, match="cannot be imported"):
        build_pull_service(library, {}).pull(str(original))
    assert library.list_models() == []


def test_two_files_of_one_name_do_not_replace_each_other(service: Any, original: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / original.name
    other.parent.mkdir()
    other.write_bytes(GGUF + b"other")
    first = service.pull(str(original))
    with pytest.raises(NameTaken, match="--name"):
        service.pull(str(other))
    assert service.pull(str(other), name="other").id == "other"
    assert service.library.find(first.id) == first


def test_a_file_that_changed_is_pulled_anew(library: Library, service: Any, original: Path) -> None:
    old = service.pull(str(original))
    original.unlink()
    original.write_bytes(GGUF + b"new")
    new = service.pull(str(original))
    assert new.path != old.path
    assert library.list_models() == [new]
    assert (library.folder(new) / "model.gguf").read_bytes() == GGUF + b"new"


def test_two_pulls_of_one_model_are_one_import(
    library: Library, make_service: Callable[..., Any], original: Path
) -> None:
    imports: list[Path] = []
    other_waits = threading.Event()

    def slow_import(gguf: Path, folder: Path) -> None:
        imports.append(gguf)
        assert other_waits.wait(30)
        make_model_folder(folder)

    def report(progress: PullProgress) -> None:
        if progress.phase == "waiting":
            other_waits.set()

    service = make_service(library, import_gguf=slow_import)

    async def both() -> list[Any]:
        return await asyncio.gather(*(service.pull_async(str(original), report) for _ in range(2)))

    first, second = asyncio.run(both())
    assert first == second
    assert len(imports) == 1


def test_pulls_of_different_models_run_side_by_side(
    library: Library, make_service: Callable[..., Any], original: Path, tmp_path: Path
) -> None:
    both_there = threading.Barrier(2, timeout=30)

    def meeting_import(gguf: Path, folder: Path) -> None:
        both_there.wait()
        make_model_folder(folder)

    other = tmp_path / "other.gguf"
    other.write_bytes(GGUF)
    service = make_service(library, import_gguf=meeting_import)

    async def both() -> list[Any]:
        return await asyncio.gather(service.pull_async(str(original)), service.pull_async(str(other)))

    assert [record.id for record in asyncio.run(both())] == ["my-model.q8_0", "other"]


def test_many_pulls_leave_the_event_loops_threads_alone(
    library: Library, make_service: Callable[..., Any], original: Path
) -> None:
    go_on = threading.Event()

    def slow_import(gguf: Path, folder: Path) -> None:
        assert go_on.wait(30)
        make_model_folder(folder)

    service = make_service(library, import_gguf=slow_import)

    async def pull_and_work() -> list[Any]:
        pulls = [asyncio.create_task(service.pull_async(str(original))) for _ in range(40)]
        try:
            async with asyncio.timeout(20):
                await asyncio.sleep(0)
                await asyncio.to_thread(lambda: None)  # as every chat does
        finally:
            go_on.set()
        return await asyncio.gather(*pulls)

    assert len({record.id for record in asyncio.run(pull_and_work())}) == 1
    service.close()


def test_a_database_without_room_is_a_full_disk(service: Any, library: Library, original: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(GGUF)
    record = service.pull(str(other))
    with library._database.reading() as db:
        db.conn.execute("PRAGMA max_page_count = 1")  # what it has now, that is
        for length in (2000, 100, 1):
            with suppress(sqlite3.OperationalError):
                for n in range(1000):
                    library.add(msgspec.structs.replace(record, id=f"m{length}-{n}", aliases=(), path="x" * length))
        with pytest.raises(DiskFull, match="pull again"):
            service.pull(str(original))
        db.conn.execute("PRAGMA max_page_count = 1000000")
    assert service.pull(str(original)).id == "my-model.q8_0"


def test_an_import_needs_room_for_its_files(library: Library, make_service: Callable[..., Any], original: Path) -> None:
    with pytest.raises(DiskFull, match="importing My Model"):
        make_service(library, disk=Disk(free_bytes=lambda folder: 1 << 20)).pull(str(original))


def test_a_service_that_is_closed_stops_its_pulls(service: Any, library: Library, original: Path) -> None:
    service.close()
    with pytest.raises(PullStopped):
        service.pull(str(original))
    assert library.list_models() == []


def test_another_process_at_work_is_named(library: Library, service: Any, original: Path) -> None:
    fd = os.open(library.home / "library.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, b"4242")
        with pytest.raises(LibraryBusy, match="process 4242"):
            service.pull(str(original))
    finally:
        os.close(fd)
    assert service.pull(str(original)).id == "my-model.q8_0"


def test_what_a_killed_pull_left_is_swept_and_nothing_else(library: Library, service: Any, original: Path) -> None:
    models, parts = library.models_folder, library.models_folder / ".partial"
    keep = [
        models / "my-own-things",
        models / "unknown-0123456789ab",
        parts / "young-0123456789ab" / "model",
    ]
    sweep = [models / "gone-0123456789ab", parts / "old-0123456789ab" / "model", parts / "done-0123456789ab" / "work"]
    for folder in keep + sweep:
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
    library.discard("models/gone-0123456789ab")
    os.utime(sweep[1].parent, (0, 0))
    service.pull(str(original))
    assert [folder for folder in keep + sweep if folder.exists()] == keep
    assert library.discarded() == []
    assert [(pull.model, pull.source, pull.num_bytes) for pull in Stagings(library).unfinished()] == [
        ("young", None, 1)
    ]


def test_an_alias_of_another_model_is_no_name_for_this_one(library: Library, service: Any, original: Path) -> None:
    other = service.pull(str(original), name="other")
    library.add(msgspec.structs.replace(other, aliases=("mine",)))
    with pytest.raises(NameTaken, match="mine is an alias of other"):
        service.pull(str(original), name="mine")


def test_a_pull_that_fails_lets_go_of_the_lock(library: Library, service: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        service.pull(f"file:{tmp_path}/absent.gguf")
    with LibraryLock(library.home).held() as alone:
        assert alone
