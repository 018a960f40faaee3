"""The mapping of folders to `inferd.*`, and what a wheel holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("appliance", "engine", "kernels", "tui", "webui")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_subpackage_is_listed() -> None:
    found = {"inferd.kernels"}  # a namespace portion: no __init__.py, so that it can never shadow another `kernels`
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join(["inferd", *init.parent.relative_to(ROOT).parts]))
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found


def test_folders_that_must_stay_without_init() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "packaging" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_dependency_has_its_reason() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    requirements = [
        line for line in lines if line.startswith('    "') and any(c in line for c in "<>=") and "[" not in line[:5]
    ]
    without = [line for line in requirements if "#" not in line]
    assert not without


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves a `build` folder behind that would leak into the next wheel."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*FOLDERS, "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(command, cwd=tree, check=True, timeout=120)
    (built,) = (tree / "dist").glob("*.whl")
    return built


def test_wheel_holds_our_namespace_alone(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert names
    assert all(name.startswith("inferd/") for name in names)


def test_wheel_holds_every_source(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"inferd/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for suffix in ("*.py", "*.c", "*.h")
        for path in (ROOT / folder).rglob(suffix)
        if "__pycache__" not in path.parts
    }
    assert expected <= names
