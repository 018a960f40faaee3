"""The process that compiles grammars: `python -P -m inferd.engine.grammar.child`.

A few characters of regex can ask for hours of work or all memory, inside libraries that cannot be interrupted. So they
are compiled here, where the parent can end them and the kernel bounds the memory.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import IO

import msgspec

from inferd.engine.core.parent import die_with_parent
from inferd.engine.grammar.backends import make_backend
from inferd.engine.grammar.base import CannotExpress, GrammarBackend
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.grammar.vocabulary import Vocabulary, read_vocabulary

EXTRA_MEMORY_BYTES = 2 << 30  # beyond what this process holds once a backend is loaded
MAX_COMPILED_BYTES = 64 << 20
SIZE_BYTES = 8  # of the length before each message


class Start(msgspec.Struct, array_like=True):
    """The first message to the process."""

    folder: str  # with tokenizer.json
    vocab_size: int
    eos_token_ids: list[int]
    parent_pid: int
    death_fd: int


class Prepare(msgspec.Struct, tag="prepare", array_like=True):
    """Load a backend; answered by an empty `Compiled`."""

    backend: str


class Compile(msgspec.Struct, tag="compile", array_like=True):
    backend: str  # a prepared one
    spec: StructuredOutput


class Compiled(msgspec.Struct, tag="compiled", array_like=True):
    data: bytes = b""


class Refused(msgspec.Struct, tag="refused", array_like=True):
    why: str


Order = Prepare | Compile
Answer = Compiled | Refused


def write_message(stream: IO[bytes], message: Order | Answer | Start) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(SIZE_BYTES, "big") + data)
    stream.flush()


def main() -> None:
    orders, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    start = msgspec.msgpack.decode(_read(orders), type=Start)
    die_with_parent(start.death_fd, start.parent_pid, kernel_signal=True)
    vocabulary = read_vocabulary(Path(start.folder), start.vocab_size, start.eos_token_ids)
    backends: dict[str, GrammarBackend] = {}
    decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
    while data := _read(orders):
        order = decoder.decode(data)
        if isinstance(order, Prepare):
            write_message(answers, _prepare(order.backend, backends, vocabulary))
        else:
            write_message(answers, _compile(backends[order.backend], order.spec))


def _prepare(name: str, backends: dict[str, GrammarBackend], vocabulary: Vocabulary) -> Answer:
    if name not in backends:
        _limit(resource.RLIM_INFINITY)
        backends[name] = make_backend(name, vocabulary)
        _limit(EXTRA_MEMORY_BYTES)
    return Compiled()


def _compile(backend: GrammarBackend, spec: StructuredOutput) -> Answer:
    try:
        data = backend.compile(spec)
    except CannotExpress as error:
        return Refused(str(error))
    except MemoryError:
        return Refused(f"needs more than {EXTRA_MEMORY_BYTES >> 30} GB to compile")
    except RecursionError:
        return Refused("is nested too deeply to compile")
    except Exception as error:  # whatever a library does with a stranger's grammar, the next one is asked
        return Refused(f"{type(error).__name__}: {error}")
    if len(data) > MAX_COMPILED_BYTES:
        return Refused(f"has {len(data) >> 20} MB compiled, above the limit of {MAX_COMPILED_BYTES >> 20} MB")
    return Compiled(data)


def _limit(extra_bytes: int) -> None:
    """The soft limit only: it is lifted while a backend is loaded."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard if extra_bytes == resource.RLIM_INFINITY else used + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(stream: IO[bytes]) -> bytes:
    """Empty at the end of the stream."""
    return stream.read(int.from_bytes(stream.read(SIZE_BYTES), "big"))


if __name__ == "__main__":
    main()
