"""The admin key that a daemon makes when there is none yet."""

from __future__ import annotations

import os
from pathlib import Path

from inferd.appliance.auth.keys import KeyStore

FILE_NAME = "admin.key"


def ensure_admin_key(keys: KeyStore, home: Path) -> str | None:
    """The new key, to be shown once; None when there is one. It also stands in a file that only its owner can read."""
    if keys.has_admin():
        return None
    return write_admin_key(keys, home)


def write_admin_key(keys: KeyStore, home: Path) -> str:
    """A new admin key in the place of the old one."""
    key = keys.reset_admin()
    path = home / FILE_NAME
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{key}\n")
    return key
