"""The grammar of model names. Folder names are made from them, so nothing else may pass."""

from __future__ import annotations

import re

from inferd.appliance.library.errors import InvalidName

MAX_SEGMENT_CHARS = 96
MAX_SEGMENTS = 2  # "org/name"
IDENTITY_CHARS = 12  # at the end of a folder's name, after a dash
_SEGMENT = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_FOREIGN = re.compile(r"[^a-z0-9._-]+")


def check_name(name: str) -> str:
    """Returns `name`; raises `InvalidName` unless it is one or two segments of `[a-z0-9._-]{1,96}` joined by "/".

    A segment starts with a letter or digit: "." and ".." are folders, and "-x" is a flag on the command line.
    """
    segments = name.split("/")
    if len(segments) > MAX_SEGMENTS or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise InvalidName(
            f"{name!r} cannot be a model's name: use a-z, 0-9, '.', '_', '-', starting with a letter or digit, "
            f"at most {MAX_SEGMENT_CHARS} characters, with at most one '/'"
        )
    return name


def name_from(text: str) -> str:
    """The nearest valid one-segment name: `Llama 3 (Instruct)` → `llama-3-instruct`. Raises `InvalidName`."""
    cleaned = _FOREIGN.sub("-", text.lower()).strip("-._")[:MAX_SEGMENT_CHARS]
    return check_name(cleaned)


def folder_name(name: str, identity: str) -> str:
    """The folder of one model with one content. `identity` is a hex digest over all that the content depends on.

    Two contents of one model never share a folder, so a new one is put in place without touching the old one.
    """
    return f"{name.replace('/', '--')}-{identity[:IDENTITY_CHARS]}"
