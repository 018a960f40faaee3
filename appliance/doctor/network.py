"""The daemon's port: free, ours, or somebody else's."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from inferd.appliance.doctor.finding import Finding, failure, fine
from inferd.appliance.listener import holder_of
from inferd.appliance.settings import http_address


@dataclass(frozen=True)
class NetworkFacts:
    host: str = "127.0.0.1"
    port: int = 4633
    holder: str = ""  # of the port; empty: it is free
    version: str = ""  # of the inferd that answers there
    bind_error: str = ""  # why it could not be had even though nobody has it


def check_network(facts: NetworkFacts) -> Iterator[Finding]:
    where = http_address(facts.host, facts.port)
    if facts.version:
        yield fine("port", f"inferd {facts.version} answers at {where}")
    elif facts.holder:
        remedy = "End that program, or set another port (INFERD_PORT, `inferd serve --port`)."
        yield failure("port", f"{where} is taken by {facts.holder}, which is not inferd", remedy)
    elif facts.bind_error:
        remedy = "Set host to an address of this machine, and port to one above 1023."
        yield failure("port", f"{where} cannot be used: {facts.bind_error}", remedy)
    else:
        yield fine("port", f"{where} is free: no daemon runs here")


def read_network(host: str, port: int) -> NetworkFacts:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return NetworkFacts(host, port, bind_error=str(error))
    family, _, _, _, address = infos[0]
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(3)
        if client.connect_ex(address) == 0:
            version = _version(host, port)
            return NetworkFacts(host, port, holder="" if version else holder_of(address), version=version)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            return NetworkFacts(host, port, bind_error=error.strerror or str(error))
    return NetworkFacts(host, port)


def _version(host: str, port: int) -> str:
    """Empty for what is not inferd."""
    try:
        with httpx.Client(trust_env=False, timeout=3) as client:
            body = client.get(http_address(host, port)).json()
    except (httpx.HTTPError, ValueError):
        return ""
    return str(body.get("version", "")) if isinstance(body, dict) and body.get("name") == "inferd" else ""
