"""Memory of a worker that can be given back and had again, by tag."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inferd.engine.errors import NotSupported
from inferd.engine.worker.host_memory import MappedArena, let_go, settle

NO_ARENA = (
    "sleep is not supported on {device} yet: its memory is not allocated so that it could be given back while captured "
    "steps keep their addresses; unload the model instead"
)


class TaggedMemory(Protocol):
    """What one owner holds. Several may have one tag, as each model's weights do; they come back in order of `add`."""

    @property
    def tag(self) -> str: ...

    @property
    def num_bytes(self) -> int:
        """Of the device's memory. While it is not there: what it took."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Of main memory, in order to come back. 0 while it is there."""
        ...

    def release(self, level: int) -> None:
        """Give it back. At level 1 whatever lets it come back soon may be kept; level 2 lets go of that as well, also
        when level 1 was before. Idempotent."""
        ...

    def restore(self) -> None:
        """Have it again after `release`. Raises LoadError where content that must be as it was cannot be had."""
        ...


class Arena(TaggedMemory, Protocol):
    """Raw memory whose tensors stay valid over `release` and `restore`, at their addresses; the content is lost."""

    def empty(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] of undefined content."""
        ...


class FixedArena:
    """Implements `Arena` with memory of torch's own allocator, which is not given back."""

    def __init__(self, tag: str, device: torch.device) -> None:
        self.tag = tag
        self.kept_bytes = 0
        self.num_bytes = 0
        self._device = device

    def empty(self, num_bytes: int) -> Tensor:
        self.num_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def release(self, level: int) -> None:
        raise NotSupported(NO_ARENA.format(device=self._device.type), param="sleep")

    def restore(self) -> None:
        """It never went."""


class Restored(NamedTuple):
    num_bytes: int
    seconds: float


class Pools:
    """All tagged memory of one worker. The one place that knows what is there and what is not.

    An accelerator's arena would keep the addresses of weights too, so that captured steps stay good: it belongs here,
    in place of `FixedArena`. Until there is one, such memory is told of and cannot be given back: `refusal` says so.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.refusal = None if device.type == "cpu" else NO_ARENA.format(device=device.type)
        self._memories: list[TaggedMemory] = []
        self._missing: set[str] = set()

    def add(self, memory: TaggedMemory) -> None:
        self._memories.append(memory)

    def make_arena(self, tag: str) -> Arena:
        """One of this worker's device."""
        arena: Arena = MappedArena(tag) if self._device.type == "cpu" else FixedArena(tag, self._device)
        self.add(arena)
        return arena

    @property
    def kept_bytes(self) -> int:
        return sum(memory.kept_bytes for memory in self._memories)

    def num_bytes(self, tag: str) -> int:
        """0 while it is not there."""
        return 0 if tag in self._missing else sum(memory.num_bytes for memory in self._tagged(tag))

    def check(self) -> None:
        """Raises RuntimeError unless all memory is there."""
        if self._missing:
            raise RuntimeError(f"the worker is asleep: {', '.join(sorted(self._missing))} must be restored first")

    def release(self, level: int) -> dict[str, int]:
        """Of every tag; the bytes given back by tag, 0 for what was not there. Raises NotSupported with `refusal`."""
        if self.refusal is not None:
            raise NotSupported(self.refusal, param="sleep")
        tags = dict.fromkeys(memory.tag for memory in self._memories)
        released = {tag: self.num_bytes(tag) for tag in tags}
        self._missing = set(tags)  # whatever happens next, no step may run
        for memory in self._memories:
            memory.release(level)
        let_go()
        return released

    def restore(self, tags: Iterable[str]) -> dict[str, Restored]:
        """Bytes and seconds by tag; tags of what is there are passed over. After an error, none of that tag counts as
        there."""
        restored = {}
        for tag in tags:
            if tag not in self._missing:
                continue
            began_s = time.monotonic()
            for memory in self._tagged(tag):
                memory.restore()
            self._missing.remove(tag)
            restored[tag] = Restored(self.num_bytes(tag), time.monotonic() - began_s)
        settle()
        return restored

    def _tagged(self, tag: str) -> list[TaggedMemory]:
        return [memory for memory in self._memories if memory.tag == tag]
