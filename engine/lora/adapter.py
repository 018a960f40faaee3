"""An adapter as the scheduler and its requests know it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

NO_ADAPTER = 0
FIELD = "lora"  # of a request
MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class Adapter:
    """One that was loaded. Loaded again under its name it is another one, with an id of its own."""

    id: int  # unique in the engine's life, above `NO_ADAPTER`
    name: str
    path: str  # its folder
    digest: str  # of what its files hold: equal ones give equal keys and values


class AdapterInfo(msgspec.Struct):
    """What `list_loras` tells of an adapter."""

    name: str
    id: int
    path: str
    is_removed: bool  # no request finds it any more; those that hold it go on
    is_in_memory: bool  # else its files are read again when it is wanted
    num_requests: int  # that hold it, waiting or running
    num_running: int
