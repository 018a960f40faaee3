"""`LLM("name")`: the engine asks the library through its entry point."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferd.appliance.downloads.factory import build_pull_service
from inferd.appliance.library.library import Library
from inferd.appliance.library.lookup import folder_of
from inferd.engine.errors import ConfigError, LoadError
from inferd.engine.frontend.llm import LLM
from inferd.engine.frontend.model_names import model_folder
from inferd.engine.testing.model_folder import make_model_folder


@pytest.fixture
def folder(tmp_path: Path, inferd_home: Path) -> Path:
    """Of the model `tiny` in the library."""
    original = make_model_folder(tmp_path / "tiny", replies={"": "hi"})
    (original / "model.safetensors").write_bytes(b"weights")
    with Library.open(inferd_home) as library:
        return library.folder(build_pull_service(library, {}).pull(str(original)))


def test_a_name_of_the_library_is_a_model(folder: Path) -> None:
    assert model_folder("tiny") == folder
    with LLM("Tiny", in_process=True, executor="scripted", device="cpu", max_model_len=256) as llm:
        assert llm.generate("x", progress=False)[0].num_output_tokens > 0


def test_a_folder_needs_no_library(tmp_path: Path, inferd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = make_model_folder(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    assert model_folder("here") == Path("here")
    assert model_folder(here) == here
    assert not inferd_home.exists()


def test_what_is_neither_is_told_the_way(inferd_home: Path) -> None:
    with pytest.raises(LoadError, match=r"nope is neither a model folder nor the name .*inferd show NAME --path"):
        LLM("nope")
    assert not inferd_home.exists()  # nobody asked for a library


def test_a_library_that_cannot_be_read_is_told(folder: Path, inferd_home: Path) -> None:
    for path in inferd_home.glob("library.db*"):
        path.write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"cannot say where tiny is: .*library\.db"):
        folder_of("tiny")


def test_a_bad_configuration_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "INFERD_PROT", "1")
    with pytest.raises(ConfigError, match="INFERD_PORT"):
        folder_of("tiny")
