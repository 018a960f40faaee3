"""Every setting with its value and where that came from, for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inferd.appliance.settings import Settings, every_setting, table_of

NOT_SET = "not set"
HIDDEN = "********"
SECRET_NAME = re.compile(r"(^|_)(secret|password|passphrase|token|credential|api_key)s?$")
USER_INFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # of an address: a name and a password


def described(settings: Settings) -> list[tuple[str, str, str]]:
    """(key, value, origin) in the order of the tables; values as TOML writes them, secrets hidden."""
    return [
        (key, NOT_SET if value is None else shown(key, value), settings.origin_of(key))
        for key, value in values_of(settings)
    ]


def values_of(settings: Settings) -> Iterator[tuple[str, Any]]:
    """(key, value) of all but tables; those of a table that is not there are None."""
    for key, field in every_setting():
        if table_of(field) is None:
            value: Any = settings
            for part in key.split("."):
                value = getattr(value, part, None)
            yield key, value


def shown(key: str, value: Any) -> str:
    """As TOML writes it, and nothing that lets its reader in somewhere."""
    if SECRET_NAME.search(key.rpartition(".")[2]):
        return f'"{HIDDEN}"'
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(shown(key, item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(USER_INFO.sub(HIDDEN, value), ensure_ascii=False)
    if isinstance(value, float):
        return f"{value:.10g}"
    return json.dumps(value)
