"""Arrows between the folders go one way. Read from the sources; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "engine", "appliance", "tui", "webui")

# What the appliance may know of the engine: its torch-free front.
ENGINE_FRONT = (
    "inferd.engine.config",
    "inferd.engine.convert",
    "inferd.engine.errors",
    "inferd.engine.params",
    "inferd.engine.messages",
    "inferd.engine.model_config",
    "inferd.engine.core.client",
    "inferd.engine.core.lines",
    "inferd.engine.frontend",
    "inferd.engine.grammar.spec",
    "inferd.engine.importer.run",
    "inferd.engine.pooling.checks",
    "inferd.engine.pooling.inputs",
    "inferd.engine.pooling.offline",
    "inferd.engine.pooling.outputs",
    "inferd.engine.pooling.params",
    "inferd.engine.pooling.vectors",
    "inferd.engine.insight",
)
CORE = ("inferd.engine.core",)  # bookkeeping: no torch, and no sockets but in these three
SOCKET_FILES = {"proc.py", "client.py", "launch.py", "link.py"}


def sources(folder: str) -> Iterator[Path]:
    return (path for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything that a file imports, wherever in the file."""
    package = ["inferd", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def offenders(folder: str, forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imports(path)
        if under(name, forbidden) and not under(name, allowed)
    ]


def test_kernels_know_nothing_of_the_engine() -> None:
    assert not offenders("kernels", ("inferd.engine", "inferd.appliance"))


def test_engine_knows_nothing_of_the_appliance() -> None:
    assert not offenders("engine", ("inferd.appliance",))


def test_appliance_sees_only_the_engines_front() -> None:
    assert not offenders("appliance", ("inferd.engine", "inferd.kernels", "torch"), ENGINE_FRONT)


def test_faces_see_only_the_client_and_its_records() -> None:
    allowed = (
        "inferd.appliance.admin_client",
        "inferd.appliance.events.follow",
        "inferd.appliance.events.messages",
        "inferd.appliance.events.mirror",
        "inferd.appliance.schemas",
    )
    for face in ("tui", "webui"):
        assert not offenders(face, ("inferd.appliance", "inferd.engine", "inferd.kernels", "torch"), allowed)


def test_core_holds_no_tensors_and_few_sockets() -> None:
    assert not offenders("engine/core", ("torch", "numpy"))
    with_sockets = {line.split()[0].rsplit("/", 1)[-1] for line in offenders("engine/core", ("zmq", "socket"))}
    assert with_sockets <= SOCKET_FILES


def test_only_our_namespace_is_imported() -> None:
    assert not [line for folder in FOLDERS for line in offenders(folder, FOLDERS)]


def test_no_code_from_data() -> None:
    """Pickle and its kin run code from files. Nobody is excepted: even old checkpoints are only parsed."""
    banned = ("pickle", "dill", "marshal", "cloudpickle", "shelve", "torch.load")
    assert not [line for folder in FOLDERS for line in offenders(folder, banned)]
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in FOLDERS
        for path in sources(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "torch.load", "pickle.loads")
    ]
    assert not calls
