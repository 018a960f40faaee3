"""Main memory of this process: how much it is, and how the system gets it back."""

from __future__ import annotations

import ctypes
import gc
import mmap
from types import FunctionType, ModuleType

import psutil
import torch
from torch import Tensor


class MappedArena:
    """Implements `Arena` with pages of the system's own, which go back to it while their addresses stay."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.kept_bytes = 0
        self.num_bytes = 0
        self._maps: list[mmap.mmap] = []

    def empty(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] of undefined content."""
        # Private, since the system keeps the content of shared pages when it is told that nobody needs them.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._maps.append(memory)
        self.num_bytes += num_bytes
        return torch.frombuffer(memory, dtype=torch.uint8)

    def release(self, level: int) -> None:
        for memory in self._maps:
            memory.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """The next access to a page gets one."""


def let_go() -> None:
    """Collect garbage, also of what was frozen at start-up, and give unused memory back to the system."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
    trim()


def settle() -> None:
    """After something large was loaded: what has been frozen at start-up is so again, what loading left over goes."""
    if gc.get_freeze_count() > 0:
        gc.collect()
        gc.freeze()
    trim()


def trim() -> None:
    """Give memory that was freed back to the system."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:  # other C libraries than glibc keep no large blocks back
        malloc_trim(0)


def resident_bytes() -> int:
    """Of this process."""
    return psutil.Process().memory_info().rss


def tensor_bytes(root: object, device: torch.device) -> int:
    """Of all memory on `device` that lives as long as `root` does: its tensors, and those in what it calls."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[object] = [root]
    while stack:
        found = stack.pop()
        if id(found) in seen or isinstance(found, type | ModuleType):
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            if found.device.type == device.type:
                storage = found.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(found, FunctionType):  # but not its module's globals
            stack += [found.__closure__, found.__defaults__, found.__kwdefaults__]
        else:
            stack += gc.get_referents(found)
    return sum(storages.values())
