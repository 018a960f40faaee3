"""One file over HTTP: resumed, bounded, verified, and only then in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from inferd.appliance.downloads import redirects
from inferd.appliance.downloads.digest import Digest, FileHasher, hash_file
from inferd.appliance.downloads.disk import Disk
from inferd.appliance.downloads.partfile import Journal, PartFile
from inferd.appliance.downloads.progress import PullProgress, Report
from inferd.appliance.downloads.retry import Interrupted, RetryPolicy, StopSignal, retry_after_s
from inferd.appliance.library.errors import (
    AccessDenied,
    BadTransfer,
    DigestMismatch,
    NetworkFailure,
    SourceNotFound,
)
from inferd.appliance.library.records import ModelFile

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Download:
    """`name` is for people. `headers` hold credentials of the URL's origin; a redirect to another one drops them."""

    url: str
    name: str
    digest: Digest | None = None
    size_bytes: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Fetcher:
    """Blocking; one file a call, any thread. Each attempt opens a client of its own, so no connection outlives its
    file. `stop` ends every call at its next chunk with `PullStopped`.
    """

    def __init__(
        self, open_client: Callable[[], httpx.Client], stop: StopSignal, retry: RetryPolicy, disk: Disk
    ) -> None:
        self._open_client = open_client
        self._stop = stop
        self._retry = retry
        self._disk = disk

    def fetch(self, download: Download, dest: Path, report: Report) -> ModelFile:
        """Puts the file at `dest`, whose folder exists; a `dest` that is already right costs one reading.

        Raises `NetworkFailure`, `AccessDenied`, `SourceNotFound`, `BadTransfer`, `DigestMismatch`, `DiskFull`,
        `PullStopped`. Whatever is raised, `dest` is absent or whole.
        """
        present = self._present(download, dest, report)
        if present is not None:
            return present
        try:
            return self._fetch_once(download, dest, report, resume=True)
        except _ResumedWrong:
            # The wrong byte may be one that a power cut left in the old part: everything again, once.
            return self._fetch_once(download, dest, report, resume=False)

    def _present(self, download: Download, dest: Path, report: Report) -> ModelFile | None:
        if not dest.exists():
            return None
        size_bytes = dest.stat().st_size
        hasher = FileHasher(download.digest, size_bytes)
        hash_file(dest, hasher, self._verifying(download.name, size_bytes, report))
        if hasher.matches:
            return ModelFile(dest.name, size_bytes, hasher.sha256)
        dest.unlink()
        return None

    def _verifying(self, name: str, size_bytes: int | None, report: Report) -> Callable[[int], None]:
        def on_bytes(done: int) -> None:
            self._stop.check()
            report(PullProgress("verifying", name, done, size_bytes))

        return on_bytes

    def _fetch_once(self, download: Download, dest: Path, report: Report, *, resume: bool) -> ModelFile:
        digest = str(download.digest) if download.digest else None
        wanted = Journal(redirects.public_text(download.url), digest, download.size_bytes)
        with PartFile(dest, download.name, wanted, download.digest, self._disk) as part:
            if resume:
                part.resume(self._verifying(download.name, download.size_bytes, report))
            else:
                part.restart()
            num_resumed = part.offset
            self._fill(part, download, report)
            try:
                return part.commit()
            except DigestMismatch as error:
                if num_resumed:
                    raise _ResumedWrong from error
                raise

    def _fill(self, part: PartFile, download: Download, report: Report) -> None:
        """Asks for the rest again and again until it is all there or nothing new comes."""
        num_failures, furthest = 0, part.offset
        while part.offset == 0 or part.offset != download.size_bytes:
            try:
                with self._open_client() as client:
                    self._stream(client, part, download, report)
                return
            except (httpx.TransportError, Interrupted) as error:
                num_failures = 1 if part.offset > furthest else num_failures + 1
                furthest = max(furthest, part.offset)
                if num_failures >= self._retry.max_failures:
                    raise NetworkFailure(
                        f"{download.name} cannot be fetched from {redirects.public_text(download.url)}: "
                        f"{error or type(error).__name__}; what has arrived stays, pull again later"
                    ) from error
                self._stop.pause(self._retry.delay_s(num_failures, getattr(error, "asked_s", None)))

    def _stream(self, client: httpx.Client, part: PartFile, download: Download, report: Report) -> None:
        """One request for everything after `part.offset`, written as it arrives."""
        with self._response(client, part, download) as response:
            _check_status(response, part, download)
            first, announced = _extent(response)
            _check_extent(response, first, announced, part, download)
            total = download.size_bytes if announced is None else announced
            if first != part.offset:
                part.restart()
            part.note(response.headers.get("etag"))
            if total is not None:
                self._disk.require(total - part.offset, part.dest.parent, download.name)
            for chunk in response.iter_raw():
                self._stop.check()
                if total is not None and part.offset + len(chunk) > total:
                    raise BadTransfer(f"{download.name}: more bytes came than the {total} that were announced")
                part.append(chunk)
                report(PullProgress("downloading", download.name, part.offset, total))
        if total is not None and part.offset < total:
            raise Interrupted(f"the answer ended after {part.offset} of {total} bytes")

    @contextmanager
    def _response(self, client: httpx.Client, part: PartFile, download: Download) -> Iterator[httpx.Response]:
        headers = {"accept-encoding": "identity", **download.headers}
        if part.offset:
            headers["range"] = f"bytes={part.offset}-"
            etag = part.journal.etag
            if etag is not None and not etag.startswith("W/"):
                headers["if-range"] = etag
        request = client.build_request("GET", download.url, headers=headers)
        for _ in range(redirects.MAX_REDIRECTS + 1):
            self._stop.check()
            response = client.send(request, stream=True)
            try:
                target = response.next_request
                if target is None:
                    yield response
                    return
            finally:
                response.close()
            reason = redirects.refusal(request.url, target.url)
            if reason is not None:
                raise BadTransfer(f"{download.name}: a redirect to {redirects.public_text(target.url)}: {reason}")
            request = target
        raise BadTransfer(f"{download.name}: more than {redirects.MAX_REDIRECTS} redirects")


class _ResumedWrong(Exception):
    """A digest mismatch in a file whose beginning is of an earlier attempt."""


def _check_status(response: httpx.Response, part: PartFile, download: Download) -> None:
    status = response.status_code
    place = redirects.public_text(response.url)
    if status in (200, 206):
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise BadTransfer(f"{download.name}: {place} sends it as {encoding}, which was not asked for")
        return
    if status == 416:  # what we have is longer than the file: it was replaced by a shorter one
        num_kept = part.offset
        part.restart()
        raise Interrupted(f"{place} has no byte {num_kept}")
    if status in (401, 403):
        raise AccessDenied(f"{place} answers {status}: it does not let us have {download.name}")
    if status in (404, 410):
        raise SourceNotFound(f"{place} answers {status}: it has no {download.name}")
    if status in _TRANSIENT_STATUS:
        raise Interrupted(f"it answers {status}", retry_after_s(response.headers.get("retry-after")))
    raise BadTransfer(f"{download.name}: {place} answers {status}")


def _extent(response: httpx.Response) -> tuple[int, int | None]:
    """(the first byte's place in the file, the whole file's size or None where the server does not tell)."""
    if response.status_code == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if match is None:
            raise BadTransfer(f"{redirects.public_text(response.url)} sends a part without saying which")
        return int(match[1]), None if match[3] == "*" else int(match[3])
    length = response.headers.get("content-length", "")
    return 0, int(length) if length.isdecimal() else None


def _check_extent(
    response: httpx.Response, first: int, announced: int | None, part: PartFile, download: Download
) -> None:
    if first not in (0, part.offset):
        raise BadTransfer(f"{download.name}: asked for byte {part.offset}, got byte {first}")
    if announced is not None and download.size_bytes not in (None, announced):
        raise BadTransfer(f"{download.name}: {download.size_bytes} bytes were announced, the server says {announced}")
    etags = (part.journal.etag, response.headers.get("etag"))
    if first and None not in etags and etags[0] != etags[1]:
        part.restart()
        raise Interrupted("the file changed on the server")
