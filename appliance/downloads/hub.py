"""`hf:` sources. huggingface-hub says what a repository holds; the bytes come through our own `Fetcher`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from inferd.appliance.downloads.digest import Digest
from inferd.appliance.downloads.fetch import Download, Fetcher
from inferd.appliance.downloads.importer import ModelImporter
from inferd.appliance.downloads.offer import Delivery, Offer, Staging, identity_of
from inferd.appliance.downloads.progress import Report
from inferd.appliance.downloads.retry import Interrupted, RetryPolicy, StopSignal, persist, retry_after_s
from inferd.appliance.downloads.select import GGUF_NAME, MAX_CONFIG_BYTES, WEIGHTS_INDEX, Selection, select_files
from inferd.appliance.downloads.shards import check_index
from inferd.appliance.downloads.source import Source
from inferd.appliance.library.errors import (
    AccessDenied,
    BadTransfer,
    InvalidSource,
    LibraryError,
    SourceNotFound,
    UnsupportedModel,
)
from inferd.appliance.library.names import name_from
from inferd.appliance.library.records import ModelFile

TIMEOUT_S = 30.0
# huggingface-hub lets the errors of its HTTP library through, and which library that is has changed twice. What its own
# error inherits from is that library's base class.
_TRANSPORT_ERRORS = cast("tuple[type[Exception], ...]", (*HfHubHTTPError.__bases__, OSError))


@dataclass(frozen=True)
class HubAccess:
    """`endpoint` None: the public hub. `token` is sent to the endpoint's origin only."""

    endpoint: str | None
    token: str | None


class Hub:
    """What repositories hold."""

    def __init__(self, access: HubAccess, retry: RetryPolicy, stop: StopSignal) -> None:
        self.access = access
        self._retry = retry
        self._stop = stop
        self._api = HfApi(endpoint=access.endpoint, token=access.token or False)

    def info(self, source: Source) -> ModelInfo:
        """Raises `SourceNotFound`, `AccessDenied`, `InvalidSource`, `BadTransfer`, `NetworkFailure`."""
        return persist(lambda: self._ask(source), f"the hub has no answer about {source}", self._retry, self._stop)

    def download(self, source: Source, commit: str, file: RepoSibling) -> Download:
        url = hf_hub_url(source.name, file.rfilename, revision=commit, endpoint=self.access.endpoint)
        headers = {"authorization": f"Bearer {self.access.token}"} if self.access.token else {}
        return Download(url, file.rfilename, digest_of(file), file.size, headers)

    def denied(self, source: Source) -> AccessDenied:
        if self.access.token is None:
            way = "if it is gated or private, set HF_TOKEN to a token of an account that may read it"
        else:
            way = "the token in HF_TOKEN may not read it: accept its terms on the hub with that account"
        return AccessDenied(f"the hub does not let us have {source}: {way}")

    def _ask(self, source: Source) -> ModelInfo:
        try:
            return self._api.model_info(source.name, revision=source.revision, files_metadata=True, timeout=TIMEOUT_S)
        except OfflineModeIsEnabled as error:
            raise LibraryError(f"{source} needs the network, and HF_HUB_OFFLINE is set; unset it") from error
        except HFValidationError as error:
            raise InvalidSource(f"{source}: {error}") from error
        except RevisionNotFoundError as error:
            raise SourceNotFound(f"{source}: the repository has no revision {source.revision or 'main'}") from error
        except GatedRepoError as error:
            raise self.denied(source) from error
        except RepositoryNotFoundError as error:
            if error.response.status_code in (401, 403):  # what the hub also says of repositories that are not there
                raise self.denied(source) from error
            raise SourceNotFound(f"the hub has no repository {source.name}") from error
        except HfHubHTTPError as error:
            raise self._status_error(error, source) from error
        except _TRANSPORT_ERRORS as error:
            raise Interrupted(f"{type(error).__name__}: {error}") from error

    def _status_error(self, error: HfHubHTTPError, source: Source) -> Exception:
        status = error.response.status_code
        if status in (401, 403):
            return self.denied(source)
        if status == 429 or status >= 500:
            return Interrupted(f"it answers {status}", retry_after_s(error.response.headers.get("retry-after")))
        return BadTransfer(f"the hub answers {status} about {source}")


class HubProvider:
    def __init__(self, hub: Hub, fetcher: Fetcher, importer: ModelImporter) -> None:
        self._hub = hub
        self._fetcher = fetcher
        self._importer = importer

    def offer(self, source: Source, report: Report) -> Offer:
        info = self._hub.info(source)
        files = {file.rfilename: file for file in info.siblings or []}
        selection = select_files(list(files), source.choice, str(source))
        wanted = [files[name] for name in (*selection.config, *selection.weights)]
        commit = info.sha
        if commit is None:
            raise BadTransfer(f"the hub does not say which commit {source} is")

        def deliver(staging: Staging, report: Report) -> Delivery:
            downloads = {file.rfilename: self._hub.download(source, commit, file) for file in wanted}
            try:
                return self._deliver(selection, downloads, staging, report)
            except AccessDenied as error:
                raise self._hub.denied(source) from error

        return Offer(
            source=source,
            model_id=_model_id(source, selection),
            aliases=_aliases(source, selection),
            revision=commit,
            identity=identity_of([part for file in wanted for part in (file.rfilename, str(digest_of(file)))]),
            needed_bytes=sum(file.size or 0 for file in wanted),
            deliver=deliver,
        )

    def _deliver(
        self, selection: Selection, downloads: Mapping[str, Download], staging: Staging, report: Report
    ) -> Delivery:
        """The configuration first: what cannot be served costs no gigabytes."""
        if selection.format == "gguf":
            name = selection.weights[0]
            return Delivery([self._fetcher.fetch(downloads[name], staging.model / GGUF_NAME, report)], name, "gguf")
        files = [self._fetch_config(downloads[name], staging.model, report) for name in selection.config]
        self._importer.check(staging.model)
        if WEIGHTS_INDEX in selection.config:
            check_index(staging.model / WEIGHTS_INDEX, selection.weights)
        files += [self._fetcher.fetch(downloads[name], staging.model / name, report) for name in selection.weights]
        return Delivery(files, selection.weights[0], "safetensors")

    def _fetch_config(self, download: Download, folder: Path, report: Report) -> ModelFile:
        if (download.size_bytes or 0) > MAX_CONFIG_BYTES:
            raise UnsupportedModel(f"{download.name} has {download.size_bytes} bytes, too many for such a file")
        dest = folder / download.name
        dest.parent.mkdir(exist_ok=True, mode=0o700)
        return msgspec.structs.replace(self._fetcher.fetch(download, dest, report), name=download.name)


def digest_of(file: RepoSibling) -> Digest | None:
    """SHA-256 of large files, git's blob id of small ones. None where the hub tells neither."""
    if file.lfs is not None:
        return Digest("sha256", file.lfs.sha256)
    if file.blob_id is not None and file.size is not None:
        return Digest("git-sha1", file.blob_id)
    return None


def _model_id(source: Source, selection: Selection) -> str:
    """`org/name`; with a chosen GGUF file, the name says which."""
    org, _, name = source.name.partition("/")
    if source.choice is None:
        return f"{name_from(org)}/{name_from(name)}"
    stem = selection.weights[0].rpartition("/")[2].removesuffix(".gguf")
    return f"{name_from(org)}/{name_from(stem)}"


def _aliases(source: Source, selection: Selection) -> tuple[str, ...]:
    return (_model_id(source, selection).rpartition("/")[2],)
