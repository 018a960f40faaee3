"""How a GGUF file is quantised, in its users' words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import LlamaFileType

from inferd.engine.importer.quantisation import FILE_TYPES, quantisation_of
from inferd.engine.loader.gguf_header import read_header
from inferd.engine.testing.tiny_gguf import tiny_metadata, tiny_tensors, write_gguf


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"general__file_type": 15}, "Q4_K_M"),
        ({}, "Q8_0"),  # of most bytes: norms are not quantised
        ({"general__file_type": 9999}, "Q8_0"),
        ({"general__file_type": "seven"}, "Q8_0"),
    ],
)
def test_the_file_says_or_most_of_its_bytes_do(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    source = write_gguf(tmp_path / "model.gguf", tiny_metadata(**changes), tiny_tensors(), "Q8_0")
    assert quantisation_of(read_header(source)) == expected


def test_a_file_without_tensors_has_none(tmp_path: Path) -> None:
    assert quantisation_of(read_header(write_gguf(tmp_path / "model.gguf", tiny_metadata(), {}))) is None


def test_numbers_mean_what_the_format_says() -> None:
    named = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    del named[LlamaFileType.GUESSED.value]
    assert named.items() <= FILE_TYPES.items()
