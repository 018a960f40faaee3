"""One file from a server that cuts, lies, flips bytes and redirects."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferd.appliance.downloads.digest import Digest
from inferd.appliance.downloads.disk import Disk
from inferd.appliance.downloads.fetch import Download, Fetcher
from inferd.appliance.downloads.progress import PullProgress, ignore_progress
from inferd.appliance.downloads.redirects import public_text, refusal
from inferd.appliance.downloads.retry import RetryPolicy, StopSignal
from inferd.appliance.library.errors import (
    AccessDenied,
    BadTransfer,
    DigestMismatch,
    DiskFull,
    NetworkFailure,
    PullStopped,
    SourceNotFound,
)

BODY = random.Random(7).randbytes(60_000)
SHA256 = Digest("sha256", hashlib.sha256(BODY).hexdigest())
FAST = RetryPolicy(max_failures=3, first_delay_s=0.0, max_delay_s=0.0)


def make_fetcher(
    *,
    stop: StopSignal | None = None,
    disk: Disk | None = None,
    retry: RetryPolicy = FAST,
    timeout_s: float = 10.0,
) -> Fetcher:
    def open_client() -> httpx.Client:
        return httpx.Client(timeout=timeout_s, trust_env=False)

    return Fetcher(open_client, stop or StopSignal(), retry, disk or Disk())


def make_download(server: Any, **fields: Any) -> Download:
    defaults: dict[str, Any] = {"digest": SHA256, "size_bytes": len(BODY)}
    return Download(f"{server.url}/model", "model", **(defaults | fields))


@pytest.fixture
def server(mean_server: Any) -> Any:
    mean_server.serve({"/model": BODY})
    return mean_server


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    folder = tmp_path / "download"
    folder.mkdir()
    return folder / "model.gguf"


def ranges(server: Any) -> list[str | None]:
    return [request.headers.get("range") for request in server.requests]


def interrupt(server: Any, dest: Path, after_bytes: int, **fields: Any) -> None:
    """Leaves a part of `after_bytes` bytes."""
    server.faults.cut_after = [after_bytes]
    with pytest.raises(NetworkFailure):
        make_fetcher(retry=RetryPolicy(max_failures=1)).fetch(make_download(server, **fields), dest, ignore_progress)
    assert not dest.exists()
    assert dest.with_name("model.gguf.partial").stat().st_size == after_bytes
    server.requests.clear()


def test_a_whole_file_leaves_nothing_but_itself(server: Any, dest: Path) -> None:
    seen: list[PullProgress] = []
    file = make_fetcher().fetch(make_download(server), dest, seen.append)
    assert dest.read_bytes() == BODY
    assert (file.name, file.size_bytes, file.sha256) == ("model.gguf", len(BODY), SHA256.hex)
    assert [path.name for path in dest.parent.iterdir()] == ["model.gguf"]
    assert [progress.bytes_done for progress in seen] == sorted(progress.bytes_done for progress in seen)
    assert seen[-1] == PullProgress("downloading", "model", len(BODY), len(BODY))


def test_a_line_that_breaks_all_the_time_is_fetched_byte_by_byte(server: Any, dest: Path) -> None:
    server.faults.cut_after = [7_000] * 8
    make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert dest.read_bytes() == BODY
    assert ranges(server) == [None, *(f"bytes={7_000 * count}-" for count in range(1, 9))]


def test_a_server_that_falls_silent_is_asked_again(server: Any, dest: Path) -> None:
    server.faults.cut_after = [20_000]
    server.faults.stalls_s = [0.0, 3.0]
    make_fetcher(timeout_s=1.0).fetch(make_download(server), dest, ignore_progress)
    assert dest.read_bytes() == BODY
    assert ranges(server) == [None, "bytes=20000-", "bytes=20000-"]


def test_a_later_call_goes_on_where_the_first_was_cut(server: Any, dest: Path) -> None:
    interrupt(server, dest, 20_000)
    make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert dest.read_bytes() == BODY
    assert ranges(server) == ["bytes=20000-"]


def test_a_file_that_is_there_is_not_fetched_again(server: Any, dest: Path) -> None:
    dest.write_bytes(BODY)
    assert make_fetcher().fetch(make_download(server), dest, ignore_progress).sha256 == SHA256.hex
    assert server.requests == []


def test_a_damaged_file_that_is_there_is_replaced(server: Any, dest: Path) -> None:
    dest.write_bytes(BODY[:-1])
    make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert dest.read_bytes() == BODY


def test_a_server_that_ignores_ranges_starts_from_the_beginning(server: Any, dest: Path) -> None:
    interrupt(server, dest, 20_000)
    server.faults.ignore_ranges = 1
    make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert dest.read_bytes() == BODY


def test_a_file_that_changed_meanwhile_is_not_mixed_with_the_old_one(server: Any, dest: Path) -> None:
    interrupt(server, dest, 20_000, digest=None)
    new = BODY[::-1]
    server.serve({"/model": new})
    file = make_fetcher().fetch(make_download(server, digest=None), dest, ignore_progress)
    assert dest.read_bytes() == new
    assert file.sha256 == hashlib.sha256(new).hexdigest()


def test_a_part_of_another_file_is_thrown_away(server: Any, dest: Path) -> None:
    interrupt(server, dest, 20_000)
    new = BODY[::-1]
    server.serve({"/model": new})
    digest = Digest("sha256", hashlib.sha256(new).hexdigest())
    make_fetcher().fetch(make_download(server, digest=digest), dest, ignore_progress)
    assert dest.read_bytes() == new
    assert ranges(server) == [None]


def test_a_part_longer_than_the_file_is_thrown_away(server: Any, dest: Path) -> None:
    interrupt(server, dest, 20_000, size_bytes=None)
    with dest.with_name("model.gguf.partial").open("ab") as part:
        part.write(b"x" * len(BODY))
    make_fetcher().fetch(make_download(server, size_bytes=None), dest, ignore_progress)
    assert dest.read_bytes() == BODY


@pytest.mark.parametrize("journal", [b"", b"{", b'{"url": 1}', None])
def test_a_broken_or_missing_journal_means_a_new_start(server: Any, dest: Path, journal: bytes | None) -> None:
    interrupt(server, dest, 20_000)
    path = dest.with_name("model.gguf.partial.json")
    path.unlink()
    if journal is not None:
        path.write_bytes(journal)
    make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert ranges(server) == [None]
    assert dest.read_bytes() == BODY


def test_a_wrong_digest_names_both_and_leaves_nothing(server: Any, dest: Path) -> None:
    wrong = Digest("sha256", "ab" * 32)
    with pytest.raises(DigestMismatch) as caught:
        make_fetcher().fetch(make_download(server, digest=wrong), dest, ignore_progress)
    assert wrong.hex in str(caught.value)
    assert SHA256.hex in str(caught.value)
    assert list(dest.parent.iterdir()) == []


def test_a_flipped_byte_is_found(server: Any, dest: Path) -> None:
    server.faults.flip_at = [12_345]
    with pytest.raises(DigestMismatch):
        make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert list(dest.parent.iterdir()) == []


def test_a_byte_that_went_bad_in_the_part_is_healed_by_fetching_again(server: Any, dest: Path) -> None:
    interrupt(server, dest, 20_000)
    part = dest.with_name("model.gguf.partial")
    part.write_bytes(b"\0" * 20_000)
    make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert dest.read_bytes() == BODY


def test_git_ids_are_verified_too(server: Any, dest: Path) -> None:
    blob = Digest("git-sha1", hashlib.sha1(b"blob %d\0" % len(BODY) + BODY).hexdigest())
    server.faults.cut_after = [10_000]
    assert make_fetcher().fetch(make_download(server, digest=blob), dest, ignore_progress).sha256 == SHA256.hex
    dest.unlink()
    with pytest.raises(DigestMismatch, match="git-sha1"):
        make_fetcher().fetch(make_download(server, digest=Digest("git-sha1", "0" * 40)), dest, ignore_progress)


@pytest.mark.parametrize("lie_bytes", [-100, 100])
def test_a_size_that_is_not_the_announced_one_is_refused(server: Any, dest: Path, lie_bytes: int) -> None:
    server.faults.lie_bytes = lie_bytes
    with pytest.raises(BadTransfer, match="60000 bytes were announced"):
        make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert not dest.exists()


def test_a_server_without_sizes_is_fine_if_the_digest_is(server: Any, dest: Path) -> None:
    server.faults.hide_size = True
    make_fetcher().fetch(make_download(server, size_bytes=None), dest, ignore_progress)
    assert dest.read_bytes() == BODY


def test_a_stream_without_end_stops_at_the_announced_size(server: Any, dest: Path) -> None:
    server.faults.hide_size = True
    with pytest.raises(BadTransfer, match="more bytes"):
        make_fetcher().fetch(make_download(server, size_bytes=1000), dest, ignore_progress)
    assert not dest.exists()


def test_a_compressed_answer_is_refused(server: Any, dest: Path) -> None:
    server.faults.encoding = "gzip"
    with pytest.raises(BadTransfer, match="gzip"):
        make_fetcher().fetch(make_download(server), dest, ignore_progress)


@pytest.mark.parametrize(
    ("status", "error", "exit_code"), [(401, AccessDenied, 6), (403, AccessDenied, 6), (404, SourceNotFound, 4)]
)
def test_refusals_are_not_tried_again(
    server: Any, dest: Path, make_reply: Callable[..., Any], status: int, error: type[Exception], exit_code: int
) -> None:
    server.faults.statuses = [make_reply(status)]
    with pytest.raises(error) as caught:
        make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert getattr(caught.value, "exit_code", None) == exit_code
    assert len(server.requests) == 1


def test_passing_trouble_is_tried_again_and_lasting_trouble_is_named(
    server: Any, dest: Path, make_reply: Callable[..., Any]
) -> None:
    server.faults.statuses = [make_reply(503), make_reply(429, headers={"retry-after": "0"})]
    make_fetcher().fetch(make_download(server), dest, ignore_progress)
    dest.unlink()
    server.faults.statuses = [make_reply(503)] * 3
    with pytest.raises(NetworkFailure, match="503") as caught:
        make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert caught.value.exit_code == 75


def test_nobody_listens(server: Any, dest: Path) -> None:
    download = make_download(server)
    server.close()
    server.close = lambda: None
    with pytest.raises(NetworkFailure, match="pull again"):
        make_fetcher().fetch(download, dest, ignore_progress)


def test_the_server_may_ask_for_patience_but_not_for_an_hour() -> None:
    policy = RetryPolicy(first_delay_s=0.5, max_delay_s=20.0)
    assert [policy.delay_s(count, None) for count in (1, 2, 3, 7, 60)] == [0.5, 1.0, 2.0, 20.0, 20.0]
    assert policy.delay_s(1, 3.0) == 3.0
    assert policy.delay_s(1, 3600.0) == 60.0


def test_credentials_do_not_follow_to_another_origin(
    server: Any, make_server: Callable[[], Any], make_reply: Callable[..., Any], dest: Path
) -> None:
    front = make_server()
    front.answer = lambda request: make_reply(302, headers={"location": f"{server.url}/model"})
    download = make_download(front, headers={"authorization": "Bearer secret"})
    make_fetcher().fetch(download, dest, ignore_progress)
    assert front.requests[0].headers["authorization"] == "Bearer secret"
    assert "authorization" not in server.requests[0].headers


def test_a_redirect_in_a_circle_ends(mean_server: Any, make_reply: Callable[..., Any], dest: Path) -> None:
    mean_server.answer = lambda request: make_reply(302, headers={"location": "/model"})
    with pytest.raises(BadTransfer, match="redirects"):
        make_fetcher().fetch(make_download(mean_server), dest, ignore_progress)


@pytest.mark.parametrize(
    ("origin", "target", "refused"),
    [
        ("https://hub.example/a", "https://cdn.example/b", False),
        ("https://hub.example/a", "http://cdn.example/b", True),
        ("https://hub.example/a", "file:///etc/passwd", True),
        ("https://hub.example/a", "gopher://x/", True),
        ("https://hub.example/a", "https://127.0.0.1/b", True),
        ("https://hub.example/a", "https://[::1]/b", True),
        ("https://hub.example/a", "https://[::ffff:127.0.0.1]/b", True),
        ("https://hub.example/a", "https://localhost/b", True),
        ("https://hub.example/a", "https://169.254.169.254/latest", True),
        ("https://hub.example/a", "https://0.0.0.0/b", True),
        ("http://127.0.0.1:1/a", "http://127.0.0.1:2/b", False),
    ],
)
def test_where_a_redirect_may_lead(origin: str, target: str, refused: bool) -> None:
    assert (refusal(httpx.URL(origin), httpx.URL(target)) is not None) == refused


def test_messages_hold_no_credentials() -> None:
    assert public_text("https://me:secret@x.example/a?signature=secret#x") == "https://x.example/a"


def test_no_room_is_said_before_the_first_byte(server: Any, dest: Path) -> None:
    disk = Disk(free_bytes=lambda folder: len(BODY))  # enough for the file, not for 1.05 times the file
    with pytest.raises(DiskFull, match=r"61\.5 KiB.*58\.6 KiB free") as caught:
        make_fetcher(disk=disk).fetch(make_download(server), dest, ignore_progress)
    assert caught.value.exit_code == 7
    assert dest.with_name("model.gguf.partial").stat().st_size == 0


def test_a_disk_that_fills_up_leaves_a_part_that_is_used_later(server: Any, dest: Path) -> None:
    room = 30_000

    def write(fd: int, data: memoryview) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(fd, data[: min(room, 1000)])  # a short write is no error
        room -= written
        return written

    with pytest.raises(DiskFull, match="stays"):
        make_fetcher(disk=Disk(write=write)).fetch(make_download(server), dest, ignore_progress)
    server.requests.clear()
    make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert ranges(server) == ["bytes=30000-"]
    assert dest.read_bytes() == BODY


def test_stopping_ends_a_transfer_and_keeps_the_part(server: Any, dest: Path) -> None:
    stop = StopSignal()
    with pytest.raises(PullStopped):
        make_fetcher(stop=stop).fetch(make_download(server), dest, lambda progress: stop.set())
    assert 0 < dest.with_name("model.gguf.partial").stat().st_size < len(BODY)
    make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert dest.read_bytes() == BODY


def test_a_link_in_the_place_of_the_part_is_not_followed(server: Any, dest: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    dest.with_name("model.gguf.partial").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        make_fetcher().fetch(make_download(server), dest, ignore_progress)
    assert victim.read_text() == "mine"
