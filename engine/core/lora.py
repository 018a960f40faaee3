"""What scheduling and control calls ask of whoever knows the adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from inferd.engine.core.admission import AdmissionGate
from inferd.engine.errors import NotSupported
from inferd.engine.lora.adapter import FIELD, Adapter
from inferd.engine.request import Request


class LoraManager(AdmissionGate, Protocol):
    """Refuses admission while as many other adapters as have slots run requests.

    Requests without an adapter are told of too, and nothing is done for them.
    """

    def find(self, name: str) -> Adapter:
        """Raises `InvalidRequest` naming an adapter that is not loaded. Any thread."""
        ...

    def check(self, request: Request) -> None:
        """Raises `InvalidRequest` when the request's adapter was removed after it had been found."""
        ...

    def add(self, request: Request) -> None:
        """The request waits from now on. Each comes once, and leaves by `remove`; its adapter stays for so long."""
        ...

    def set_aside(self, request: Request) -> None:
        """It is not asked about for some time, and nobody need wait for it."""
        ...

    def start(self, request: Request) -> None:
        """It runs from now on, until `stop`."""
        ...

    def stop(self, request: Request) -> None:
        """It was preempted, or has ended."""
        ...

    def remove(self, request: Request) -> None:
        """It has ended, in whatever way, and does not run."""
        ...

    def take_failures(self) -> dict[str, str]:
        """Waiting requests whose adapter cannot be had again, and why; each is named once."""
        ...

    @property
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """Control calls by name."""
        ...


def refuse_loras(*_: Any) -> NoReturn:
    """Stands for every control call of an engine without adapters. Raises NotSupported."""
    raise NotSupported("this engine has no adapters; start it with enable_lora", param=FIELD)


NO_LORA_CALLS: Mapping[str, Callable[..., Any]] = dict.fromkeys(("add_lora", "list_loras", "remove_lora"), refuse_loras)
