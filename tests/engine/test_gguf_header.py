"""The GGUF header reader agrees with the reference package, and no bytes make it do worse than LoadError."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.errors import LoadError
from inferd.engine.loader import gguf_header
from inferd.engine.loader.gguf_header import parse_header, read_header
from inferd.engine.testing.tiny_gguf import tiny_metadata, tiny_tensors, write_gguf

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "t", shape: Sequence[int] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    data_bytes: int = 1024,
) -> bytes:
    counts = struct.pack(
        "<QQ",
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    return magic + version + counts + b"".join(pairs) + b"".join(tensors) + bytes(data_bytes)


def parse(data: bytes) -> gguf_header.GGUFHeader:
    return parse_header(data, len(data), "model.gguf")


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, tiny_metadata(), tiny_tensors(), "Q8_0")


def test_agrees_with_the_reference_reader(tiny_file: Path) -> None:
    ours, theirs = read_header(tiny_file), gguf.GGUFReader(tiny_file)

    assert ours.version == 3
    for info, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert info.name == other.name
        assert info.shape == tuple(int(size) for size in other.shape)[::-1]
        assert info.type.name == other.tensor_type.name
        assert (info.offset_bytes, info.num_bytes) == (other.data_offset, other.n_bytes)
    assert {key for key in theirs.fields if not key.startswith("GGUF.")} == set(ours.metadata)
    for key, value in ours.metadata.items():
        other_value = theirs.fields[key].contents()
        assert (list(value) if isinstance(value, tuple) else value) == other_value


def test_type_table_agrees_with_the_reference_package() -> None:
    for type_id, kind in gguf_header.GGML_TYPES.items():
        reference = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, kind.block_size, kind.block_bytes) == (reference.name, *gguf.GGML_QUANT_SIZES[reference])


def test_reads_version_2_and_every_kind_of_value() -> None:
    pairs = [
        pair("a", UINT8, b"\x07"),
        pair("b", FLOAT32, struct.pack("<f", 0.5)),
        pair("c", BOOL, b"\x01"),
        pair("d", STRING, text("wörd")),
        pair("e", ARRAY, struct.pack("<IQ", UINT32, 2) + struct.pack("<2I", 1, 2)),
        pair("f", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("")),
    ]
    read = parse(header(pairs, version=struct.pack("<I", 2)))
    assert read.metadata == {"a": 7, "b": 0.5, "c": True, "d": "wörd", "e": (1, 2), "f": ("x", "")}
    assert read.integer("a") == 7
    assert read.boolean("c") is True
    assert read.integers("e") == (1, 2)
    assert read.texts("f") == ("x", "")
    assert read.number("a") == 7.0
    assert read.text("missing", "default") == "default"


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        ("integer", "flag", "flag.*must be an integer"),
        ("boolean", "number", "number.*must be true or false"),
        ("text", "missing", "missing.*must be text, but is missing"),
        ("number", "flag", "flag.*must be a number"),
        ("texts", "numbers", "numbers.*each element text.*array of 1 × int"),
        ("integers", "number", "number.*must be an array"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(kind: str, key: str, message: str) -> None:
    pairs = [
        pair("flag", BOOL, b"\0"),
        pair("number", UINT8, b"\1"),
        pair("numbers", ARRAY, struct.pack("<IQB", UINT8, 1, 1)),
    ]
    with pytest.raises(LoadError, match=rf"model\.gguf: .*{message}"):
        getattr(parse(header(pairs)), kind)(key)


HOSTILE = {
    "not GGUF": (header(magic=b"GGML"), "magic"),
    "version 1": (header(version=struct.pack("<I", 1)), "version.*1 is not supported"),
    "big endian": (header(version=struct.pack(">I", 3)), "big endian"),
    "too many tensors": (header(num_tensors=2**63), "number of tensors"),
    "too many keys": (header(num_pairs=2**32), "number of metadata keys"),
    "keys that are not there": (header(num_pairs=60_000, data_bytes=8), "truncated"),
    "endless key": (header([struct.pack("<Q", 2**64 - 1)]), "length"),
    "key beyond the file": (header([struct.pack("<Q", 5000)]), "truncated"),
    "key that is no text": (header([text(b"\xff\xfe")]), "UTF-8"),
    "unknown kind of value": (header([pair("k", 99, b"")]), "unknown value type 99"),
    "nested arrays": (header([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "array of arrays"),
    "endless array": (header([pair("k", ARRAY, struct.pack("<IQ", UINT8, 2**62))]), "number of elements"),
    "array beyond the file": (header([pair("k", ARRAY, struct.pack("<IQ", UINT64, 10**6))]), "truncated"),
    "array of unknown kind": (header([pair("k", ARRAY, struct.pack("<IQ", 77, 1))]), "unknown value type 77"),
    "a boolean of 2": (header([pair("k", BOOL, b"\2")]), "must be 0 or 1"),
    "a key twice": (header([pair("k", UINT8, b"\0")] * 2), "twice"),
    "alignment of 0": (header([pair("general.alignment", UINT32, bytes(4))]), "power of two"),
    "alignment of 24": (header([pair("general.alignment", UINT32, struct.pack("<I", 24))]), "power of two"),
    "alignment that is text": (header([pair("general.alignment", STRING, text("32"))]), "power of two"),
    "no dimensions": (header(tensors=[tensor(shape=())]), "0 dimensions"),
    "many dimensions": (header(tensors=[tensor(shape=(1,) * 5)]), "5 dimensions"),
    "an empty axis": (header(tensors=[tensor(shape=(8, 0))]), "not possible"),
    "overflowing product": (header(tensors=[tensor(shape=(2**32, 2**32))]), "truncated"),
    "unknown type": (header(tensors=[tensor(kind=4)]), "unknown element type 4"),
    "partial block": (header(tensors=[tensor(shape=(33,), kind=8)]), "not possible for Q8_0"),
    "unaligned": (header(tensors=[tensor(offset=4)]), "multiple of 32"),
    "beyond the file": (header(tensors=[tensor(offset=2**40)]), "truncated"),
    "wrapping offset": (header(tensors=[tensor(offset=2**64 - 32)]), "truncated"),
    "overlap": (header(tensors=[tensor("a", (16,)), tensor("b", (16,), offset=32)]), "'b'.*overlaps tensor 'a'"),
    "a tensor twice": (header(tensors=[tensor("a"), tensor("a", offset=32)]), "twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused_with_its_cause(case: str) -> None:
    data, cause = HOSTILE[case]
    with pytest.raises(LoadError, match=rf"(?s)model\.gguf: .*{cause}"):
        parse(data)


def test_a_header_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(LoadError, match="header is longer"):
        parse_header(header([pair("k", STRING, struct.pack("<Q", 4000))]), 2**40, "model.gguf")


def test_many_arrays_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_ARRAY_ELEMENTS", 100)
    array = struct.pack("<IQ", UINT8, 60) + bytes(60)
    with pytest.raises(LoadError, match=r"second.*number of elements"):
        parse(header([pair("first", ARRAY, array), pair("second", ARRAY, array)]))


def test_every_truncation_is_refused(tiny_file: Path, tmp_path: Path) -> None:
    data = tiny_file.read_bytes()
    last = max(info.offset_bytes + info.num_bytes for info in read_header(tiny_file).tensors)
    start_of_data = min(info.offset_bytes for info in read_header(tiny_file).tensors)
    for length in [*range(start_of_data), *range(start_of_data, last, 97), last - 1]:
        with pytest.raises(LoadError):
            parse(data[:length])
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: last - 1])
    with pytest.raises(LoadError, match=r"cut\.gguf: tensor .*truncated"):
        read_header(cut)


@pytest.mark.parametrize("content", [b"", b"GG"])
def test_a_file_too_short_for_anything_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(content)
    with pytest.raises(LoadError, match="too few"):
        read_header(path)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("pipe.gguf", "missing.gguf", "."):
        with pytest.raises(LoadError, match="file:"):
            read_header(tmp_path / name)


def mutated(data: bytes, random_: random.Random) -> bytes:
    """Overwrites a few places with bytes, words and lengths that are likely to be trouble."""
    changed = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        position = random_.randrange(len(changed) - 8)
        match random_.randrange(5):
            case 0:
                changed[position] = random_.randrange(256)
            case 1:
                value = random_.choice([0, 1, 2**31, 2**32 - 1, random_.randrange(14)])
                changed[position : position + 4] = struct.pack("<I", value)
            case 2:
                value = random_.choice([0, 2**63, 2**64 - 1, 2**32, random_.randrange(2**20)])
                changed[position : position + 8] = struct.pack("<Q", value)
            case 3:
                del changed[position : position + random_.randrange(1, 9)]
            case 4:
                changed[position:position] = random_.randbytes(random_.randrange(1, 9))
    return bytes(changed)


def small_header() -> bytes:
    pairs = [
        pair("general.architecture", STRING, text("llama")),
        pair("general.alignment", UINT32, struct.pack("<I", 32)),
        pair("numbers", ARRAY, struct.pack("<IQ", UINT32, 3) + struct.pack("<3I", 1, 2, 3)),
        pair("words", ARRAY, struct.pack("<IQ", STRING, 3) + text("one") + text("two") + text("three")),
        pair("flag", BOOL, b"\1"),
    ]
    tensors = [tensor(f"blk.{index}.attn_q.weight", (32, 2), 8, offset=96 * index) for index in range(4)]
    return header(pairs, tensors)


def count_refused(data: bytes, num_mutations: int) -> int:
    """Parses mutations of `data`; whatever is raised besides LoadError fails the test."""
    random_, num_refused = random.Random(20_26), 0
    for _ in range(num_mutations):
        try:
            parse(mutated(data, random_))
        except LoadError:
            num_refused += 1
    return num_refused


def test_mutated_headers_raise_only_load_errors() -> None:
    assert 1000 < count_refused(small_header(), 40_000) < 39_000  # they break neither everything nor nothing


def test_a_mutated_model_file_raises_only_load_errors(tiny_file: Path) -> None:
    assert count_refused(tiny_file.read_bytes(), 3_000) > 100


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_after_the_counts_raise_only_load_errors(tail: bytes) -> None:
    data = b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + tail
    with suppress(LoadError):
        parse(data)


def test_claimed_sizes_cost_no_memory() -> None:
    cases = [data for data, _ in HOSTILE.values()]
    tracemalloc.start()
    for data in cases:
        with pytest.raises(LoadError):
            parse(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
