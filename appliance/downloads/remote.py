"""Asking a running daemon to pull."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec

from inferd.appliance.downloads.progress import Report
from inferd.appliance.downloads.source import Source
from inferd.appliance.downloads.wire import PULL_PATH, PullEvent, PullRequest, RemoteFailure
from inferd.appliance.library.errors import NetworkFailure
from inferd.appliance.library.records import ModelRecord

# A daemon answers at once and says at least "still here" every few seconds.
TIMEOUT = httpx.Timeout(60.0, connect=2.0)
NDJSON = "application/x-ndjson"


def pull_by_daemon(
    address: str, home: Path, source: Source, name: str | None, report: Report, *, socket: Path | None = None
) -> ModelRecord | None:
    """The model, or None where no daemon of this home listens at its admin `socket` (None: at `address`).

    Raises what the daemon's pull raised, and `NetworkFailure` when the daemon goes away; its pull may go on.
    """
    if socket is not None and not socket.exists():
        return None
    transport = None if socket is None else httpx.HTTPTransport(uds=str(socket))
    request = msgspec.json.encode(PullRequest(str(source), name, str(home)))
    try:
        with (
            httpx.Client(timeout=TIMEOUT, trust_env=False, transport=transport) as client,
            client.stream(
                "POST", address + PULL_PATH, content=request, headers={"content-type": "application/json"}
            ) as response,
        ):
            if response.headers.get("content-type") != NDJSON:
                return None  # another program, or a daemon with another home
            for line in response.iter_lines():
                event = msgspec.json.decode(line, type=PullEvent) if line else PullEvent()
                if event.progress is not None:
                    report(event.progress)
                if event.error is not None:
                    raise RemoteFailure(event.error)
                if event.model is not None:
                    return event.model
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return None
    except (httpx.TransportError, msgspec.DecodeError) as error:
        raise NetworkFailure(f"the daemon at {address} went away while it pulled: {error}") from error
    raise NetworkFailure(f"the daemon at {address} ended its answer early; its log says why")
