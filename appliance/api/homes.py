"""Whose library a caller means."""

from __future__ import annotations

from inferd.appliance.api.errors import ApiError

OTHER_HOME = "other_home"


def refuse_other_home(wanted: str | None, home: str) -> None:
    """A caller may say whose library it means. Raises a 409 `ApiError` where that is not this daemon's."""
    if wanted is not None and wanted != home:
        raise ApiError(409, f"This daemon's home is {home}.", code=OTHER_HOME)
