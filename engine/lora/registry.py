"""The adapters of an engine: which there are, which the workers hold, and which may run requests."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inferd.engine.config import LoRAConfig
from inferd.engine.core.admission import Refusal, WaitReason
from inferd.engine.errors import EngineError, InvalidRequest, LoadError, check_unicode
from inferd.engine.executor.base import AdapterWorkers
from inferd.engine.lora.adapter import FIELD, MAX_NAME_CHARS, Adapter, AdapterInfo
from inferd.engine.lora.fairness import SlotLine
from inferd.engine.request import Request, RequestStatus

logger = logging.getLogger(__name__)


class AdapterRegistry:
    """Implements `core.lora.LoraManager`. `find` may be called from any thread, the rest from the engine's.

    An adapter that is removed is no longer found, while requests that were taken in before go on to their end with it.
    One loaded again under its name is another one: it has an id of its own, and cached blocks are found by what the
    files hold.
    """

    def __init__(self, config: LoRAConfig, workers: AdapterWorkers) -> None:
        self._config = config
        self._workers = workers
        self._named: dict[str, Adapter] = {}
        self._removed: dict[int, Adapter] = {}  # those that requests still hold
        self._kept: OrderedDict[int, None] = OrderedDict()  # in the workers' main memory, longest unused first
        self._held: Counter[int] = Counter()  # unfinished requests by adapter id
        self._running: Counter[int] = Counter()
        self._line = SlotLine()
        self._failures: dict[str, str] = {}
        self._num_loaded = 0

    @property
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        return {"add_lora": self.add_lora, "list_loras": self.list_loras, "remove_lora": self.remove_lora}

    def add_lora(self, name: str, path: str) -> int:
        """Load an adapter's folder under a name; its id. Nothing is done when it is there from that folder already.

        Raises InvalidRequest for a name that another one has, LoadError and NotSupported for what is in the folder.
        Steps wait meanwhile.
        """
        _check_text("name", name)
        _check_text("path", path)
        folder = str(Path(path).absolute())
        known = self._named.get(name)
        if known is not None and known.path == folder:
            return known.id
        if known is not None:
            raise InvalidRequest(
                f"an adapter {name!r} is loaded from {known.path} already; remove it first, or choose another name",
                param=FIELD,
            )
        self._num_loaded += 1
        adapter = Adapter(self._num_loaded, name, folder, self._load(self._num_loaded, folder))
        self._named[name] = adapter
        logger.info("adapter %r was loaded from %s", name, folder)
        return adapter.id

    def remove_lora(self, name: str) -> int:
        """From now on no request finds it; how many unfinished ones go on with it."""
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise self._unknown(name)
        num_requests = self._held[adapter.id]
        if num_requests:
            self._removed[adapter.id] = adapter
        else:
            self._forget(adapter.id)
        return num_requests

    def list_loras(self) -> list[AdapterInfo]:
        """Also those that were removed while requests still hold them."""
        return [
            AdapterInfo(
                name=adapter.name,
                id=adapter.id,
                path=adapter.path,
                is_removed=adapter.id in self._removed,
                is_in_memory=adapter.id in self._kept,
                num_requests=self._held[adapter.id],
                num_running=self._running[adapter.id],
            )
            for adapter in [*self._named.values(), *self._removed.values()]
        ]

    def find(self, name: str) -> Adapter:
        adapter = self._named.get(name)
        if adapter is None:
            raise self._unknown(name)
        return adapter

    def check(self, request: Request) -> None:
        if request.lora is not None and self._named.get(request.lora.name) is not request.lora:
            raise self._unknown(request.lora.name)

    def refusal(self, request: Request) -> Refusal | None:
        """Has the adapter's files read again where it may run and is not in memory any more."""
        adapter = request.lora
        if adapter is None:
            return None
        refusal = Refusal(WaitReason.ADAPTER_SLOTS, len(self._running) + 1, self._config.max_loras)
        if adapter.id not in self._running and len(self._running) >= self._config.max_loras:
            self._line.wait(request.request_id)
            return refusal
        if request.status is RequestStatus.WAITING and not self._line.may_pass(request.request_id):
            return refusal
        if adapter.id not in self._kept:
            try:
                self._load_again(adapter)
            except EngineError as error:
                self._failures[request.request_id] = f"adapter {adapter.name!r} cannot be had again: {error}"
                return refusal  # for the rest of this step, with which the request ends
        return None

    def add(self, request: Request) -> None:
        if request.lora is not None:
            self._held[request.lora.id] += 1

    def set_aside(self, request: Request) -> None:
        self._line.left(request.request_id)

    def start(self, request: Request) -> None:
        if request.lora is None:
            return
        self._running[request.lora.id] += 1
        self._kept.move_to_end(request.lora.id)
        self._line.started(request.request_id)

    def stop(self, request: Request) -> None:
        if request.lora is not None:
            _count_down(self._running, request.lora.id)

    def remove(self, request: Request) -> None:
        if request.lora is None:
            return
        adapter_id = request.lora.id
        self._line.left(request.request_id)
        self._failures.pop(request.request_id, None)
        _count_down(self._held, adapter_id)
        if adapter_id in self._removed and adapter_id not in self._held:
            del self._removed[adapter_id]
            self._forget(adapter_id)

    def take_failures(self) -> dict[str, str]:
        failures, self._failures = self._failures, {}
        return failures

    def _load(self, adapter_id: int, folder: str) -> str:
        self._make_room()
        try:
            digest = self._workers.load_lora(adapter_id, folder)
        except Exception:
            self._workers.unload_lora(adapter_id)  # the ranks that could read it
            raise
        self._kept[adapter_id] = None
        return digest

    def _load_again(self, adapter: Adapter) -> None:
        if self._load(adapter.id, adapter.path) != adapter.digest:
            self._forget(adapter.id)
            raise LoadError(f"{adapter.path} holds something else than when it was loaded; remove it and load it anew")

    def _make_room(self) -> None:
        """Adapters that run stay; before others that requests wait for go those that nobody uses."""
        while len(self._kept) >= self._config.max_cpu_loras:
            idle = [adapter_id for adapter_id in self._kept if adapter_id not in self._running]
            self._forget(next((adapter_id for adapter_id in idle if adapter_id not in self._held), idle[0]))

    def _forget(self, adapter_id: int) -> None:
        """By the workers."""
        if adapter_id in self._kept:
            del self._kept[adapter_id]
            self._workers.unload_lora(adapter_id)

    def _unknown(self, name: str) -> InvalidRequest:
        known = ", ".join(sorted(self._named)) or "none"
        return InvalidRequest(f"unknown adapter {name!r}; loaded: {known}", param=FIELD)


def _check_text(what: str, text: Any) -> None:
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidRequest(f"the {what} of an adapter must be a text, not {text!r:.80}", param=FIELD)
    if what == "name" and len(text) > MAX_NAME_CHARS:
        raise InvalidRequest(f"the name of an adapter has at most {MAX_NAME_CHARS} characters", param=FIELD)
    check_unicode(FIELD, text)


def _count_down(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
