"""Where a download may be sent on to."""

from __future__ import annotations

from ipaddress import ip_address

import httpx

MAX_REDIRECTS = 5


def refusal(origin: httpx.URL, target: httpx.URL) -> str | None:
    """Why a redirect from `origin` to `target` is not followed; None when it is.

    A public server must not make us talk to this machine's own services or to a cloud's metadata address.
    """
    if target.scheme not in ("http", "https"):
        return f"{target.scheme}: is not a web address"
    if origin.scheme == "https" and target.scheme != "https":
        return "it leaves TLS"
    if _is_inside(target.host) and not _is_inside(origin.host):
        return f"{target.host} is an address of this machine or its own link"
    return None


def public_text(url: str | httpx.URL) -> str:
    """The URL without user, password and query, for messages and journals: signed links are credentials too."""
    plain = httpx.URL(url)
    return str(plain.copy_with(username="", password="", query=None, fragment=None))


def _is_inside(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped if mapped is not None else address
    return address.is_loopback or address.is_link_local or address.is_unspecified
