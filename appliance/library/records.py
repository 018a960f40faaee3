"""What the library knows of a model: frozen values, the same in the database, on the wire and in `--json`."""

from __future__ import annotations

from typing import Literal

import msgspec

WeightFormat = Literal["safetensors", "gguf"]


class ModelFile(msgspec.Struct, frozen=True):
    """One file of a model folder as it was put in place; `name` is relative to that."""

    name: str
    size_bytes: int
    sha256: str


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the library.

    `path` is its folder relative to the home. `source` is the canonical text that pulls it again, `revision` what
    that stood for at the time: a commit, a version, or None. `created_at` counts seconds since the epoch.
    """

    id: str
    source: str
    revision: str | None
    format: WeightFormat
    architecture: str
    path: str
    size_bytes: int
    quantisation: str | None
    context_limit: int
    created_at: int
    aliases: tuple[str, ...] = ()
    files: tuple[ModelFile, ...] = ()
