"""What a source has for us, found out before any weights are fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from inferd.appliance.downloads.progress import Report
from inferd.appliance.downloads.source import Source
from inferd.appliance.library.records import ModelFile, WeightFormat


@dataclass(frozen=True)
class Staging:
    """Two folders of one pull: `model` becomes the model's folder, `work` is for what is needed on the way."""

    work: Path
    model: Path


@dataclass(frozen=True)
class Delivery:
    """The verified files in `Staging.model`. `weights_name` is what the weights are called where they come from."""

    files: list[ModelFile]
    weights_name: str
    format: WeightFormat


Deliver = Callable[[Staging, Report], Delivery]


@dataclass(frozen=True)
class Offer:
    """`identity` is a hex digest of all that the content depends on: equal identities are equal models.

    `source` is what the user asked for, `revision` what it stands for now. `needed_bytes` is the most that `deliver`
    has on disk at once. `deliver` fills `Staging.model`, using what an earlier call left in the same staging.
    """

    source: Source
    model_id: str
    aliases: tuple[str, ...]
    revision: str | None
    identity: str
    needed_bytes: int
    deliver: Deliver


class Provider(Protocol):
    """One kind of source. Calls block and may come from any thread."""

    def offer(self, source: Source, report: Report) -> Offer:
        """Raises a `LibraryError` that names the source and the way out."""
        ...


def identity_of(parts: Iterable[str]) -> str:
    """SHA-256 over the parts, in order; no two lists of parts give the same input to it."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode()
        hasher.update(b"%d:" % len(data))
        hasher.update(data)
    return hasher.hexdigest()
