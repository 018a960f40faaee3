"""Structured output for the scheduler: which requests may start, what may come next, what has come."""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inferd.engine.grammar.base import CannotExpress, CompiledGrammar
from inferd.engine.grammar.cache import Failure, GrammarCache
from inferd.engine.grammar.constrained import ConstrainedOutput, Ends
from inferd.engine.grammar.gate import ReasoningGate
from inferd.engine.grammar.spec import StructuredOutput

logger = logging.getLogger(__name__)

FAILURE_S = 60.0  # how long a grammar that could not be compiled is not tried again
IDLE_S = 300.0  # after which the compiler is closed until it is needed again: its libraries take memory


class GrammarState(enum.Enum):
    WAITING = "waiting"  # for its grammar to be compiled
    READY = "ready"
    FAILED = "failed"


class Compiler(Protocol):
    """Used by one thread, and closed by it, also in between; `interrupt` comes from another one."""

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """Raises `CannotExpress`."""
        ...

    def interrupt(self) -> None:
        """Give up what is being compiled, and compile nothing more."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """Of tokens that a request sampled: how many its grammar took, whether they end the output, and what is wrong."""

    num_accepted: int
    is_ended: bool
    error: str | None = None


@dataclass(slots=True)
class _Tracked:
    spec: StructuredOutput
    key: str
    ends: Ends
    gate: ReasoningGate | None
    output: ConstrainedOutput | None = None  # once its grammar is there
    error: str | None = None


class GrammarManager:
    """Owns the grammars of all unfinished requests and the thread that has them compiled.

    The engine's thread calls it. A request holds a compiled grammar from when `state` first says READY; until then
    only the cache does, so waiting requests cannot fill memory.
    """

    def __init__(self, compiler: Compiler, vocab_size: int, eos_token_ids: Sequence[int], *, cache_bytes: int) -> None:
        self._compiler = compiler
        self._num_words = (vocab_size + 31) // 32
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._tracked: dict[str, _Tracked] = {}
        self._cache = GrammarCache(cache_bytes)  # under `_changed`, as is `_queued`
        self._queued: dict[str, StructuredOutput] = {}
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tracked

    @property
    def num_cached_bytes(self) -> int:
        return self._cache.num_bytes

    def add(
        self,
        request_id: str,
        spec: StructuredOutput,
        prompt_token_ids: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Begin to compile; `state` says when the request may start."""
        gate = None if spec.reasoning is None else ReasoningGate(*spec.reasoning, prompt_token_ids)
        ends = Ends(self._eos_token_ids, tuple(stop_token_ids), min_tokens)
        tracked = _Tracked(spec, spec.key, ends, gate)
        self._tracked[request_id] = tracked
        self._look_up(tracked)

    def remove(self, request_id: str) -> None:
        """Unknown ids are ignored. What nobody waits for any more is not compiled, unless it has begun."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None or tracked.output is not None:
            return
        with self._changed:
            if tracked.key in self._queued and all(other.key != tracked.key for other in self._tracked.values()):
                del self._queued[tracked.key]

    def state(self, request_id: str) -> GrammarState:
        tracked = self._tracked[request_id]
        if tracked.output is None and tracked.error is None:
            self._look_up(tracked)
        if tracked.error is not None:
            return GrammarState.FAILED
        return GrammarState.WAITING if tracked.output is None else GrammarState.READY

    def error(self, request_id: str) -> str | None:
        """Why a request FAILED: the message for its client."""
        return self._tracked[request_id].error

    def bitmask(self, rows: Sequence[tuple[str, Sequence[int]]]) -> NDArray[np.int32]:
        """What may come next in each request, and behind each of its draft tokens.

        `rows` are (request id, draft token ids). Returns [sum of 1 + drafts, ceil(vocab / 32)], in their order. A
        request whose grammar fails gets rows that allow everything; `accept` then has the error.
        """
        mask = np.empty((sum(1 + len(drafts) for _, drafts in rows), self._num_words), np.int32)
        start = 0
        for request_id, drafts in rows:
            window = mask[start : start + 1 + len(drafts)]
            start += len(window)
            tracked = self._tracked[request_id]
            assert tracked.output is not None, f"{request_id} runs, but its grammar is not there"
            try:
                tracked.output.fill_window(list(window), drafts)
            except Exception as error:  # of one request's grammar: the others go on
                logger.warning("the grammar of request %s failed", request_id, exc_info=True)
                tracked.error = f"its grammar failed: {error}"
                window.fill(-1)
        return mask

    def accept(self, request_id: str, token_ids: Sequence[int]) -> Verdict:
        """Take in sampled tokens, until one ends the output or is refused."""
        tracked = self._tracked[request_id]
        output = tracked.output
        assert output is not None, f"{request_id} runs, but its grammar is not there"
        for count, token_id in enumerate(token_ids):
            try:
                if tracked.error is None and not output.accept(token_id):
                    tracked.error = f"the token {token_id} was sampled, which its grammar does not allow there"
            except Exception as error:
                logger.warning("the grammar of request %s failed", request_id, exc_info=True)
                tracked.error = f"its grammar failed: {error}"
            if tracked.error is not None:
                return Verdict(count, False, tracked.error)
            if output.is_ended:
                return Verdict(count + 1, True)
        return Verdict(len(token_ids), False)

    def has_ended(self, request_id: str) -> bool:
        """Whether an end of sequence was accepted."""
        output = self._tracked[request_id].output
        return output is not None and output.is_ended

    def wait(self, timeout_s: float) -> None:
        """Until a compilation is done, for somebody who has nothing else to do."""
        with self._changed:
            if self._queued:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread and its child; a compilation that runs is given up."""
        if self._thread is not None:
            self._jobs.put(None)
            self._compiler.interrupt()
            self._thread.join()
            self._thread = None

    def _look_up(self, tracked: _Tracked) -> None:
        """Take what is in the cache, or have it compiled."""
        with self._changed:
            outcome = self._cache.get(tracked.key)
            if outcome is None or (isinstance(outcome, Failure) and outcome.until_s < time.monotonic()):
                self._enqueue(tracked)
                return
        if isinstance(outcome, Failure):
            tracked.error = outcome.error
            return
        start_id = None if tracked.spec.reasoning is None else tracked.spec.reasoning[0]
        try:
            tracked.output = ConstrainedOutput(outcome.make_matcher(), tracked.ends, tracked.gate, start_id)
        except Exception as error:
            logger.warning("a compiled %s cannot be used", tracked.spec.kind.value, exc_info=True)
            tracked.error = f"its grammar failed: {error}"

    def _enqueue(self, tracked: _Tracked) -> None:
        if tracked.key in self._queued:
            return
        self._queued[tracked.key] = tracked.spec
        self._jobs.put(tracked.key)
        if self._thread is None:  # not before the first grammar: the compiling child takes memory
            self._thread = threading.Thread(target=self._compile_all, name="engine-grammar", daemon=True)
            self._thread.start()

    # The compiling thread.

    def _compile_all(self) -> None:
        while (key := self._next_job()) is not None:
            with self._changed:
                spec = self._queued.get(key)
            if spec is None:
                continue
            outcome = self._compile(spec)
            with self._changed:
                self._queued.pop(key, None)
                self._cache.put(key, outcome)
                self._changed.notify_all()
        self._compiler.close()

    def _next_job(self) -> str | None:
        while True:
            try:
                return self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                self._compiler.close()

    def _compile(self, spec: StructuredOutput) -> CompiledGrammar | Failure:
        started_s = time.monotonic()
        try:
            grammar = self._compiler.compile(spec)
        except CannotExpress as error:
            return Failure(f"{spec.kind.value} cannot be enforced: {error}", time.monotonic() + FAILURE_S)
        except Exception as error:  # a thread that ended here would leave requests waiting for ever
            logger.exception("compiling a %s failed", spec.kind.value)
            return Failure(f"{spec.kind.value}: {type(error).__name__}: {error}", time.monotonic() + FAILURE_S)
        logger.info("compiled a %s in %.0f ms", spec.kind.value, 1000 * (time.monotonic() - started_s))
        return grammar
