"""Messages from one process to several through shared memory that has no name.

A ring of slots in an anonymous file, and two counting semaphores (eventfds) a reader: slots it may read, and slots it
is done with. All of it are file descriptors that a child inherits, so the last process to end takes it away, however it
ends; there is nothing in /dev/shm to be left behind.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from math import ceil

import msgspec

SLOT_BYTES = 64 * 1024  # one step of hundreds of requests; what is longer goes through several slots
NUM_SLOTS = 16

_HEADER = struct.Struct("<IB")  # bytes in this slot, whether the message ends with it
_HEADER_BYTES = 16


class RingTimeout(Exception):
    """A reader did not make room in time, or the wait was called off."""


class Ring(msgspec.Struct, array_like=True):
    """The file descriptors of one ring; they keep their numbers in a child that they are passed to."""

    memory_fd: int
    filled_fds: list[int]  # by reader: how many slots it has not read
    free_fds: list[int]  # by reader: how many slots it does not need
    slot_bytes: int
    num_slots: int

    @classmethod
    def create(cls, num_readers: int, *, slot_bytes: int = SLOT_BYTES, num_slots: int = NUM_SLOTS) -> Ring:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE
        memory_fd = os.memfd_create("inferd-ring")
        os.ftruncate(memory_fd, num_slots * (_HEADER_BYTES + slot_bytes))
        filled_fds = [os.eventfd(0, flags) for _ in range(num_readers)]
        free_fds = [os.eventfd(num_slots, flags) for _ in range(num_readers)]
        return cls(memory_fd, filled_fds, free_fds, slot_bytes, num_slots)

    @property
    def fds(self) -> list[int]:
        return [self.memory_fd, *self.filled_fds, *self.free_fds]

    def for_reader(self, index: int) -> Ring:
        """What one reader needs of it."""
        return msgspec.structs.replace(self, filled_fds=[self.filled_fds[index]], free_fds=[self.free_fds[index]])

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class RingWriter:
    """The one writer. Readers see every message, in order."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._slots = _Slots(ring)
        self._next = 0

    def write(self, message: bytes, timeout_s: float | None = None, cancel_fd: int | None = None) -> None:
        """Blocks while a reader is a whole ring behind: RingTimeout when it does not move for `timeout_s`, or once
        `cancel_fd` is readable. After that the message may have been written in part, and the ring is of no use."""
        rest = memoryview(message)
        while True:
            part, rest = rest[: self._ring.slot_bytes], rest[self._ring.slot_bytes :]
            for fd in self._ring.free_fds:
                _take(fd, timeout_s, cancel_fd)
            self._slots.put(self._next, part, is_last=not rest)
            self._next += 1
            for fd in self._ring.filled_fds:
                os.eventfd_write(fd, 1)
            if not rest:
                return

    def close(self) -> None:
        """Leaves the file descriptors open: `Ring.close`."""
        self._slots.close()


class RingReader:
    """One of the readers."""

    def __init__(self, ring: Ring) -> None:
        """`ring`: as from `Ring.for_reader`."""
        self._filled_fd, self._free_fd = ring.filled_fds[0], ring.free_fds[0]
        self._slots = _Slots(ring)
        self._next = 0
        self._begun = bytearray()  # of a message whose end has not come yet

    @property
    def fd(self) -> int:
        """Readable (for poll) while there is something to read."""
        return self._filled_fd

    def try_read(self) -> bytes | None:
        """The next message, if it is there to its end."""
        while _try_take(self._filled_fd):
            part, is_last = self._slots.get(self._next)
            self._next += 1
            os.eventfd_write(self._free_fd, 1)
            if is_last and not self._begun:
                return part
            self._begun += part
            if is_last:
                message, self._begun = bytes(self._begun), bytearray()
                return message
        return None

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """Blocks for the next message; None when it has not come after `timeout_s`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self.try_read()) is None:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            wait_readable([self._filled_fd], left_s)
        return message

    def close(self) -> None:
        """Leaves the file descriptors open: `Ring.close`."""
        self._slots.close()


class _Slots:
    """The mapped memory."""

    def __init__(self, ring: Ring) -> None:
        self._stride = _HEADER_BYTES + ring.slot_bytes
        self._num_slots = ring.num_slots
        self._map = mmap.mmap(ring.memory_fd, self._stride * ring.num_slots)

    def put(self, number: int, part: memoryview, *, is_last: bool) -> None:
        start = number % self._num_slots * self._stride
        _HEADER.pack_into(self._map, start, len(part), is_last)
        start += _HEADER_BYTES
        self._map[start : start + len(part)] = part

    def get(self, number: int) -> tuple[bytes, bool]:
        start = number % self._num_slots * self._stride
        length, is_last = _HEADER.unpack_from(self._map, start)
        start += _HEADER_BYTES
        return self._map[start : start + length], bool(is_last)

    def close(self) -> None:
        self._map.close()


def _take(fd: int, timeout_s: float | None, cancel_fd: int | None) -> None:
    """One from a semaphore, waiting until there is one."""
    while not _try_take(fd):
        fds = [fd] if cancel_fd is None else [fd, cancel_fd]
        ready = wait_readable(fds, timeout_s)
        if cancel_fd in ready:
            raise RingTimeout("the reader is gone")
        if not ready:
            raise RingTimeout(f"a reader made no room in {timeout_s:g} s")


def _try_take(fd: int) -> bool:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return False
    return True


def wait_readable(fds: list[int], timeout_s: float | None) -> list[int]:
    """Those that are readable, or have come to their end; none when time ran out."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else ceil(timeout_s * 1000))]
