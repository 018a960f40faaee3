"""Rooms stay small: a file, class or function over its budget is a place where two things live."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LINES = 400
CLASS_LINES = 300
FUNCTION_LINES = 80


def test_budgets() -> None:
    over: list[str] = []
    for folder in ("appliance", "engine", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = str(path.relative_to(ROOT))
            if (lines := text.count("\n")) > FILE_LINES:
                over.append(f"{name}: {lines} lines")
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > (CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES):
                    over.append(f"{name}: {node.name} has {length} lines")
    assert not over
