"""The ring in shared memory: every reader gets every message, whatever their sizes and whoever is slow."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from inferd.engine.executor.shm import Ring, RingReader, RingTimeout, RingWriter

SLOT_BYTES, NUM_SLOTS = 64, 4


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring.create(2, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS)
    yield ring
    ring.close()


@pytest.fixture
def ends(ring: Ring) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    writer, readers = RingWriter(ring), [RingReader(ring.for_reader(index)) for index in range(2)]
    yield writer, readers
    for end in (writer, *readers):
        end.close()


Ends = tuple[RingWriter, list[RingReader]]


@pytest.mark.parametrize("length", [0, 1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, SLOT_BYTES * NUM_SLOTS])
def test_a_message_comes_back_whole(ends: Ends, length: int) -> None:
    writer, readers = ends
    message = random.Random(length).randbytes(length)
    writer.write(message)
    assert [reader.read() for reader in readers] == [message] * 2
    assert [reader.try_read() for reader in readers] == [None] * 2


def test_longer_than_the_ring_and_many_of_them(ends: Ends) -> None:
    """The writer waits for the slower reader, so that nothing is overwritten before both have it."""
    writer, readers = ends
    rng = random.Random(3)
    messages = [rng.randbytes(rng.choice([0, 5, 64, 65, 300, 2000])) for _ in range(200)]
    read: list[list[bytes | None]] = [[], []]

    def drain(index: int) -> None:
        for _ in messages:
            read[index].append(readers[index].read())

    threads = [threading.Thread(target=drain, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message)
    for thread in threads:
        thread.join()
    assert read == [messages, messages]


def test_part_of_a_message_is_not_a_message(ends: Ends) -> None:
    writer, readers = ends
    with pytest.raises(RingTimeout):
        writer.write(bytes(SLOT_BYTES * (NUM_SLOTS + 1)), timeout_s=0.0)
    assert readers[0].try_read() is None
    assert readers[0].read(timeout_s=0.0) is None


def test_one_reader_that_does_not_read_is_found(ends: Ends) -> None:
    writer, readers = ends
    for _ in range(NUM_SLOTS):
        writer.write(b"x", timeout_s=0.0)
        readers[0].read()
    with pytest.raises(RingTimeout, match="no room in 0 s"):
        writer.write(b"x", timeout_s=0.0)


def test_a_wait_can_be_called_off(ends: Ends) -> None:
    writer, _ = ends
    cancel_fd = os.eventfd(1)
    with pytest.raises(RingTimeout, match="gone"):
        writer.write(bytes(SLOT_BYTES * (NUM_SLOTS + 1)), cancel_fd=cancel_fd)
    os.close(cancel_fd)


def test_nothing_has_a_name_and_nothing_stays() -> None:
    before = set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))
    ring = Ring.create(3)
    writer, reader = RingWriter(ring), RingReader(ring.for_reader(0))
    assert set(os.listdir("/dev/shm")) == before[0]
    writer.close()
    reader.close()
    ring.close()
    assert (set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))) == before
