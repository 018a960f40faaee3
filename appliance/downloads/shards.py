"""Whether the index of a sharded checkpoint and the shards belong together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferd.appliance.library.errors import UnsupportedModel


def check_index(path: Path, shards: Sequence[str]) -> None:
    """Raises `UnsupportedModel` unless every file that the index names is among `shards`."""
    try:
        index: Any = json.loads(path.read_bytes())
        named = {str(name) for name in index["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"{path.name} is not an index of shards: {type(error).__name__} {error}") from error
    missing = sorted(named - set(shards))
    if missing or not named:
        raise UnsupportedModel(f"{path.name} names {missing[0] if missing else 'no file at all'}, which is not there")
