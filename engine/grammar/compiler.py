"""The engine's side of grammar compilation: a child under a time limit, and the backends here that take its results."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from inferd.engine.errors import EngineError
from inferd.engine.grammar.backends import make_backend, refusal
from inferd.engine.grammar.base import CannotExpress, CompiledGrammar, GrammarBackend
from inferd.engine.grammar.child import SIZE_BYTES, Answer, Compile, Order, Prepare, Refused, Start, write_message
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.grammar.vocabulary import Vocabulary, read_vocabulary

START_TIMEOUT_S = 60.0  # to load a library: imports of seconds, on a machine that is busy
_FIRST_SHARE = 0.6  # of the time that is left goes to a backend that others come after


class ChildFailed(EngineError):
    """The compiling process ended, or was ended for taking too long."""

    code = "grammar_compile_failed"


class GrammarCompiler:
    """Compiles with the first of its backends that can. Belongs to one thread, which the child does not outlive.

    A backend that hands over a compiled form has it loaded here. For the others the child only shows that compiling
    ends in time, and it is done here again.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        backends: Sequence[str],
        timeout_s: float,
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._names = tuple(backends)
        self._timeout_s = timeout_s
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, GrammarBackend] = {}
        self._child: _Child | None = None
        self._interrupted = threading.Event()

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """Takes `timeout_s` at most, and the loading of libraries.

        Raises `CannotExpress` with what each backend said; `NotSupported` or `LoadError` for the model's tokenizer.
        """
        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(self._folder, self._vocab_size, self._eos_token_ids)
        said: list[str] = []
        candidates = []
        for name in self._names:
            why = refusal(name, spec)
            if why is None:
                candidates.append(name)
            else:
                said.append(why)
        left_s = self._timeout_s
        for index, name in enumerate(candidates):
            is_last = index == len(candidates) - 1
            started_s = time.monotonic()
            if self._interrupted.is_set():
                raise CannotExpress("the engine is stopping")
            try:
                child = self._prepared_child(name)
                started_s = time.monotonic()
                data = child.compile(name, spec, left_s if is_last else left_s * _FIRST_SHARE)
                return self._backend(name, self._vocabulary).load(spec, data)
            except CannotExpress as error:
                said.append(str(error))
            except ChildFailed as error:
                said.append(str(error))
                self.close()
            left_s -= time.monotonic() - started_s
        raise CannotExpress("; ".join(dict.fromkeys(said)) or "no grammar backend is installed")

    def interrupt(self) -> None:
        """From any thread: give up what is being compiled, and compile nothing more."""
        self._interrupted.set()
        child = self._child
        if child is not None:
            child.interrupt()

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _prepared_child(self, name: str) -> _Child:
        if self._child is None:
            start = Start(str(self._folder), self._vocab_size, self._eos_token_ids, os.getpid(), 0)
            self._child = _Child(start)
        self._child.prepare(name)
        return self._child

    def _backend(self, name: str, vocabulary: Vocabulary) -> GrammarBackend:
        if name not in self._backends:
            self._backends[name] = make_backend(name, vocabulary)
        return self._backends[name]


class _Child:
    """One compiling process. It ends with its parent, whatever it is doing."""

    def __init__(self, start: Start) -> None:
        death_fd, self._life_fd = os.pipe()  # closes with this process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "inferd.engine.grammar.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(death_fd,),
            env=_environment(),
        )
        os.close(death_fd)
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self._prepared: set[str] = set()
        self._write(msgspec.structs.replace(start, death_fd=death_fd))

    def prepare(self, name: str) -> None:
        if name not in self._prepared:
            self._ask(Prepare(name), START_TIMEOUT_S)
            self._prepared.add(name)

    def compile(self, name: str, spec: StructuredOutput, timeout_s: float) -> bytes:
        answer = self._ask(Compile(name, spec), timeout_s)
        if isinstance(answer, Refused):
            raise CannotExpress(answer.why)
        return answer.data

    def interrupt(self) -> None:
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # what was still buffered for it
                continue
        os.close(self._life_fd)

    def _ask(self, order: Order, timeout_s: float) -> Answer:
        """Raises `ChildFailed`; the process is of no use then."""
        deadline_s = time.monotonic() + timeout_s
        self._write(order)
        size = int.from_bytes(self._read(SIZE_BYTES, deadline_s, timeout_s), "big")
        return self._decoder.decode(self._read(size, deadline_s, timeout_s))

    def _write(self, message: Order | Start) -> None:
        assert self._process.stdin is not None
        try:
            write_message(self._process.stdin, message)
        except BrokenPipeError:
            raise ChildFailed(self._cause()) from None

    def _read(self, size: int, deadline_s: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        fd, parts, missing = self._process.stdout.fileno(), [], size
        while missing:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                raise ChildFailed(f"compiling took longer than {timeout_s:.3g} s and was stopped")
            part = os.read(fd, min(missing, 1 << 20))
            if not part:
                raise ChildFailed(self._cause())
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _cause(self) -> str:
        status = self._process.wait()
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the process that compiles grammars ended {ended}; the grammar may need too much memory"


def _environment() -> dict[str, str]:
    """No secrets, and nothing that reaches for a network."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
    return {**kept, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
