"""Which scope each path needs: the one table, and the one function that decides. A path that is not in it does not
exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inferd.appliance.auth.principal import LOCAL, Principal, Scope

Need = Scope | Literal["open"]
READING = ("GET", "HEAD")
EXACT: dict[str, Need] = {
    "/": "open",
    "/health": "open",
    "/ping": "open",
    "/ready": "open",
    "/readyz": "open",
    "/version": "open",
    "/console": "open",  # leads to the first page, or to the login
    "/metrics": "metrics",
    "/rerank": "infer",
    "/score": "infer",
    "/v2/rerank": "infer",
    "/tokenize": "infer",
    "/detokenize": "infer",
}
PREFIXES: tuple[tuple[str, Need], ...] = (
    ("/v1/", "infer"),
    ("/api/", "infer"),
    ("/admin/v1/", "admin"),
    ("/console/login", "open"),
    ("/console/static/", "open"),
    ("/console/", "read"),
)


@dataclass(frozen=True)
class Denied:
    status: Literal[401, 403]
    reason: str


def needed(method: str, path: str) -> Need | None:
    """None: there is nothing at that path. Reading what administrators see needs less than acting."""
    need = EXACT.get(path) or next((need for prefix, need in PREFIXES if path.startswith(prefix)), None)
    return "read" if need == "admin" and method in READING else need


def decide(
    need: Need, principal: Principal | None, *, has_wrong_key: bool, is_loopback: bool, loopback_inference: bool
) -> Principal | Denied:
    """`principal`: whose key came with the request; None without a valid one. Who asks without a key from this
    machine may have answers, if the owner of this machine lets them, and nothing else.
    """
    if need == "open":
        return principal or LOCAL
    if has_wrong_key:
        return Denied(401, "The API key is not valid: it is wrong, expired or revoked.")
    if principal is None:
        if need == "infer" and is_loopback and loopback_inference:
            return LOCAL
        return Denied(401, "This needs an API key: send `Authorization: Bearer KEY`.")
    if not principal.may(need):
        return Denied(403, f"The key '{principal.name}' may not do this: it lacks the scope '{need}'.")
    return principal
