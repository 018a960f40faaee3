"""What only this machine may ask for."""

from __future__ import annotations

from fastapi import Request

from inferd.appliance.api.errors import ApiError
from inferd.appliance.settings import is_loopback

OTHER_HOME = "other_home"


def refuse_strangers(request: Request) -> None:
    """Only this machine, and only under its own name: a proxy that is allowed to serve models may not change any.

    Raises a 403 `ApiError`.
    """
    client = request.client.host if request.client is not None else ""
    if not (is_loopback(client) and is_loopback(request.url.hostname or "")):
        raise ApiError(403, "Models are changed from this machine only.", type="permission_error", code="forbidden")


def refuse_other_home(wanted: str | None, home: str) -> None:
    """A caller may say whose library it means. Raises a 409 `ApiError` where that is not this daemon's."""
    if wanted is not None and wanted != home:
        raise ApiError(409, f"This daemon's home is {home}.", code=OTHER_HOME)
