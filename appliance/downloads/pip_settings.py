"""Where this machine's pip fetches from: a mirror that works for pip works for models."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

PIP_TIMEOUT_S = 20
_LAYERS = (":env:", "download", "install", "global", "site", "user")  # strongest first


@dataclass(frozen=True)
class PipSettings:
    """None: whatever is usual. `ca_file` is a bundle of certificates to trust beside the usual ones."""

    index_url: str | None = None
    ca_file: str | None = None


def read_pip_settings(environ: Mapping[str, str]) -> PipSettings:
    """The environment's own variables, else what `pip config` says; without pip, nothing is set."""
    index_url, ca_file = environ.get("PIP_INDEX_URL"), environ.get("PIP_CERT")
    if index_url and ca_file:
        return PipSettings(index_url, ca_file)
    try:
        listing = subprocess.run(
            [sys.executable, "-P", "-m", "pip", "config", "list"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return PipSettings(index_url, ca_file)  # an environment without pip is a normal one
    values = parse_pip_config(listing)
    return PipSettings(index_url or values.get("index-url"), ca_file or values.get("cert"))


def parse_pip_config(listing: str) -> dict[str, str]:
    """`pip config list`: lines like `global.index-url='URL'`. The strongest layer of each option wins."""
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, equals, literal = line.partition("=")
        layer, dot, option = key.partition(".")
        if not equals or not dot or layer not in _LAYERS:
            continue
        rank = _LAYERS.index(layer)
        if option not in found or rank < found[option][0]:
            found[option] = (rank, str(ast.literal_eval(literal)))
    return {option: value for option, (_, value) in found.items()}
