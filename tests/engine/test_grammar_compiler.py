"""Grammars are compiled in a child that can be ended, and kept only as long as there is room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from inferd.engine.config import EngineArgs
from inferd.engine.core.output import GrammarBitmask
from inferd.engine.errors import ConfigError
from inferd.engine.executor.wire import Sample, make_encoder, to_worker_decoder
from inferd.engine.grammar import manager as manager_module
from inferd.engine.grammar.backends import choose_backends
from inferd.engine.grammar.base import CannotExpress, CompiledGrammar
from inferd.engine.grammar.cache import Failure, GrammarCache
from inferd.engine.grammar.compiler import GrammarCompiler
from inferd.engine.grammar.manager import GrammarManager, GrammarState
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.resolve import resolve
from inferd.engine.testing.grammar import feed
from inferd.engine.testing.model_folder import IM_END_ID, MODEL_VOCAB_SIZE, make_model_folder

# Takes outlines-core far longer than any test: an automaton of millions of states.
POISON = StructuredOutput(regex="(.{1,900}a){1,900}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("compiler") / "model")


@pytest.fixture
def make_compiler(folder: Path) -> Iterator[Callable[..., GrammarCompiler]]:
    made = []

    def make(*backends: str, timeout_s: float = 60.0) -> GrammarCompiler:
        made.append(GrammarCompiler(folder, MODEL_VOCAB_SIZE, [IM_END_ID], backends=backends, timeout_s=timeout_s))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if is_compiler(child)]


def is_compiler(process: psutil.Process) -> bool:
    try:
        return "inferd.engine.grammar.child" in process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return False  # just ended


def test_a_compiled_grammar_comes_out_of_the_child(make_compiler: Any) -> None:
    compiler = make_compiler("outlines")
    grammar = compiler.compile(StructuredOutput(regex="ab|c"))
    assert grammar.size_bytes > 0
    assert feed(grammar.make_matcher(), b"abc") == 2
    (child,) = children()
    compiler.compile(StructuredOutput(choice=["x"]))
    assert children() == [child]
    compiler.close()
    assert not child.is_running()


def test_what_one_cannot_do_the_next_one_does(make_compiler: Any) -> None:
    compiler = make_compiler("outlines", "llguidance")
    spec = StructuredOutput(json_schema='{"type": "string", "pattern": "^a"}')
    assert feed(compiler.compile(spec).make_matcher(), b'"ab"') == 4
    with pytest.raises(CannotExpress, match=r"not.*outlines-core.*not") as raised:
        compiler.compile(StructuredOutput(json_schema='{"not": {"type": "null"}}'))
    assert "llguidance" in str(raised.value) or "Unimplemented" in str(raised.value)


def test_what_takes_too_long_is_ended(make_compiler: Any) -> None:
    compiler = make_compiler("outlines", timeout_s=0.3)
    with pytest.raises(CannotExpress, match=r"longer than 0\.3 s"):
        compiler.compile(POISON)
    assert children() == []
    assert feed(make_compiler("outlines").compile(StructuredOutput(regex="a")).make_matcher(), b"a") == 1


def test_a_slow_one_leaves_time_for_the_next(make_compiler: Any) -> None:
    compiler = make_compiler("outlines", "llguidance", timeout_s=2.0)
    assert feed(compiler.compile(POISON).make_matcher(), b"xxa") == 3


def test_a_child_that_dies_is_replaced(make_compiler: Any) -> None:
    compiler = make_compiler("llguidance")
    compiler.compile(StructuredOutput(regex="a"))
    (child,) = children()
    child.kill()
    with pytest.raises(CannotExpress, match="by signal 9"):
        compiler.compile(StructuredOutput(regex="b"))
    assert feed(compiler.compile(StructuredOutput(regex="b")).make_matcher(), b"b") == 1


def test_a_model_without_a_tokenizer(make_compiler: Any, tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, 10, [2], backends=["llguidance"], timeout_s=1.0)
    manager = GrammarManager(compiler, 10, [2], cache_bytes=1000)
    manager.add("a", StructuredOutput(regex="a"))
    wait_for(manager, "a", GrammarState.FAILED)
    assert "tokenizer.json" in str(manager.error("a"))
    manager.close()


def test_closing_ends_what_is_being_compiled(folder: Path) -> None:
    compiler = GrammarCompiler(folder, MODEL_VOCAB_SIZE, [IM_END_ID], backends=["outlines"], timeout_s=60.0)
    manager = GrammarManager(compiler, MODEL_VOCAB_SIZE, [IM_END_ID], cache_bytes=1000)
    manager.add("poison", POISON)
    while not children():
        time.sleep(0.01)
    manager.close()
    assert children() == []


def wait_for(manager: GrammarManager, request_id: str, state: GrammarState) -> None:
    for _ in range(600):
        if manager.state(request_id) is state:
            return
        manager.wait(0.1)
    raise AssertionError(f"{request_id} does not become {state}")


@dataclass
class Sized:
    """A grammar of nothing but a size; its matcher fails when it is asked for a mask."""

    size_bytes: int

    def make_matcher(self) -> Any:
        return self

    def fill_bitmask(self, row: Any) -> None:
        raise ValueError("lost its way")

    def accept(self, token_id: int) -> bool:
        return token_id != 5

    def rollback(self, num_tokens: int) -> None:
        """Nothing is kept."""

    def is_terminated(self) -> bool:
        return False


class FakeCompiler:
    def __init__(self, size_bytes: int = 1000) -> None:
        self.size_bytes = size_bytes
        self.compiled: list[str] = []

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        self.compiled.append(spec.source)
        if spec.source == "broken":
            raise CannotExpress("regex: is broken")
        return Sized(self.size_bytes)

    def interrupt(self) -> None:
        """Never busy."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def manager(compiler: FakeCompiler) -> Iterator[GrammarManager]:
    made = GrammarManager(compiler, 64, [2], cache_bytes=20_000)
    yield made
    made.close()


def test_a_grammar_is_compiled_once(manager: GrammarManager, compiler: FakeCompiler) -> None:
    for request_id in ("a", "b"):
        manager.add(request_id, StructuredOutput(regex="x"))
    for request_id in ("a", "b"):
        wait_for(manager, request_id, GrammarState.READY)
        manager.remove(request_id)
    manager.add("c", StructuredOutput(regex="x"))
    assert manager.state("c") is GrammarState.READY
    assert compiler.compiled == ["x"]


def test_a_failure_is_remembered(manager: GrammarManager, compiler: FakeCompiler) -> None:
    for request_id in ("a", "b"):
        manager.add(request_id, StructuredOutput(regex="broken"))
        wait_for(manager, request_id, GrammarState.FAILED)
        assert "regex: is broken" in str(manager.error(request_id))
    assert compiler.compiled == ["broken"]


def test_many_waiting_requests_hold_no_more_than_the_cache(manager: GrammarManager, compiler: FakeCompiler) -> None:
    names = [f"{index}" for index in range(300)]
    for name in names:
        manager.add(name, StructuredOutput(regex=f"r{name}"))
    while len(compiler.compiled) < 300:
        manager.wait(0.1)
    wait_for(manager, names[-1], GrammarState.READY)
    assert manager.num_cached_bytes <= 20_000
    wait_for(manager, names[0], GrammarState.READY)  # dropped meanwhile, and compiled again
    assert compiler.compiled.count("r0") == 2


def test_the_cache_keeps_what_was_used_last() -> None:
    cache = GrammarCache(4000)
    for key in "abc":
        cache.put(key, Sized(700))
    assert cache.get("a") is not None
    cache.put("d", Sized(700))
    assert [cache.get(key) is not None for key in "abcd"] == [True, False, True, True]
    cache.put("big", Sized(10**9))
    assert len(cache) == 1
    cache.put("x", Failure("no", 0.0))
    assert cache.num_bytes < 1000


def test_an_error_of_one_matcher_stays_with_it(manager: GrammarManager) -> None:
    manager.add("a", StructuredOutput(regex="x"))
    wait_for(manager, "a", GrammarState.READY)
    mask = manager.bitmask([("a", ())])
    assert (mask == -1).all()
    verdict = manager.accept("a", [7])
    assert verdict.num_accepted == 0
    assert "lost its way" in str(verdict.error)


def test_a_refused_token_is_named(manager: GrammarManager) -> None:
    manager.add("a", StructuredOutput(regex="x"))
    wait_for(manager, "a", GrammarState.READY)
    verdict = manager.accept("a", [3, 5, 4])
    assert verdict.num_accepted == 1
    assert "token 5" in str(verdict.error)


def test_rows_for_drafts(folder: Path) -> None:
    compiler = GrammarCompiler(folder, MODEL_VOCAB_SIZE, [IM_END_ID], backends=["llguidance"], timeout_s=60.0)
    manager = GrammarManager(compiler, MODEL_VOCAB_SIZE, [IM_END_ID], cache_bytes=1 << 20)
    manager.add("a", StructuredOutput(regex="abc?"))
    manager.add("b", StructuredOutput(regex="x"))
    for request_id in ("a", "b"):
        wait_for(manager, request_id, GrammarState.READY)

    def allowed(row: Any) -> set[int]:
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        return {int(index) for index in np.flatnonzero(bits)}

    a, b, c, x, end = ord("a"), ord("b"), ord("c"), ord("x"), IM_END_ID
    everything = set(range(32 * (-(-MODEL_VOCAB_SIZE // 32))))
    for _ in range(2):  # the first time changes nothing for the second
        rows = manager.bitmask([("a", [a, b, c, c]), ("b", []), ("b", [a])])
        assert [allowed(row) for row in rows] == [{a}, {b}, {c, end}, {end}, everything, {x}, {x}, everything]
    assert manager.accept("a", [a, b, end]).is_ended
    manager.close()


def test_an_idle_compiler_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "IDLE_S", 0.05)
    compiler = GrammarCompiler(folder, MODEL_VOCAB_SIZE, [IM_END_ID], backends=["llguidance"], timeout_s=60.0)
    manager = GrammarManager(compiler, MODEL_VOCAB_SIZE, [IM_END_ID], cache_bytes=1 << 20)
    for name in "ab":
        manager.add(name, StructuredOutput(regex=name))
        wait_for(manager, name, GrammarState.READY)
        while children():
            time.sleep(0.01)
    manager.close()


def test_a_bitmask_crosses_to_worker_processes() -> None:
    sent = Sample(3, GrammarBitmask(["a", "b"], np.array([[1, -1], [0, 5]], np.int32)))
    received = to_worker_decoder().decode(make_encoder().encode(sent))
    assert isinstance(received, Sample)
    assert received.bitmask is not None
    assert received.bitmask.request_ids == ["a", "b"]
    assert np.array_equal(received.bitmask.words, [[1, -1], [0, 5]])


def test_names_of_backends(folder: Path) -> None:
    assert choose_backends("auto") == ("xgrammar", "llguidance")
    with pytest.raises(ConfigError, match="llguidance"):
        choose_backends("gbnf")
    config = resolve(EngineArgs(str(folder), device="cpu", executor="scripted", grammar_backend="outlines"))
    assert config.grammar.backends == ("outlines",)
