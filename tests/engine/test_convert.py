"""Old checkpoints become safetensors with the same numbers, and nothing that they contain ever runs."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - writes the hostile files
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inferd.engine.convert import convert, convert_folder
from inferd.engine.errors import LoadError
from inferd.engine.importer.torch_archive import TorchArchive

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    return {
        **{f"dtype.{dtype}": (base * 50).to(dtype) for dtype in DTYPES},
        "transposed": base.t(),
        "slice": base[2:5, 1::2],
        "tied": base,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "odd": torch.arange(7, dtype=torch.int8),
    }


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def converted(folder: Path, content: Any) -> dict[str, torch.Tensor]:
    source = saved(folder / "pytorch_model.bin", content)
    convert(source, folder)
    return load_file(folder / "model.safetensors")


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype is tensor.dtype
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        OrderedDict,
        lambda tensors: {"state_dict": tensors, "epoch": 3, "lr": [0.1, None, True]},
        lambda tensors: {name: torch.nn.Parameter(t, requires_grad=False) for name, t in tensors.items()},
    ],
    ids=["dict", "ordered", "nested", "parameters"],
)
def test_every_tensor_comes_out_equal(tmp_path: Path, wrap: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    assert_same(converted(tmp_path, wrap(state())), state())


def test_a_modules_state_dict_with_its_metadata(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    assert_same(converted(tmp_path, module.state_dict()), dict(module.state_dict()))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_newer_pickle_protocols(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model.pt"
    torch.save(state(), path, pickle_protocol=protocol)
    convert(path, tmp_path)
    assert_same(load_file(tmp_path / "model.safetensors"), state())


def test_a_folder_of_shards_becomes_a_folder_of_shards(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    first, second = {"a": torch.ones(2, 3)}, {"b": torch.zeros(4), "c": torch.arange(5)}
    saved(source / "pytorch_model-00001-of-00002.bin", first)
    saved(source / "pytorch_model-00002-of-00002.bin", second)
    weight_map = {name: "pytorch_model-00001-of-00002.bin" for name in first}
    weight_map |= {name: "pytorch_model-00002-of-00002.bin" for name in second}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "modeling_evil.py").write_text("")

    convert_folder(source, target)

    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 + 16 + 40
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        *index["weight_map"].values(),
    }
    loaded = {name: load_file(target / file)[name] for name, file in index["weight_map"].items()}
    assert_same(loaded, first | second)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.bin", "z": "one.bin"}, "one.bin: lacks z"),
        ({"a": "one.bin", "b": "two.bin"}, "two.bin: holds a, and so does another shard"),
        ({"a": "../one.bin"}, "'../one.bin' is not the name of a shard"),
        ({"a": "missing.bin"}, "missing.bin: No such file"),
        ({}, "has no weight_map"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: dict[str, str], message: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    saved(source / "one.bin", {"a": torch.ones(2)})
    saved(source / "two.bin", {"a": torch.ones(2), "b": torch.ones(2)})
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(LoadError, match=message):
        convert_folder(source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_target_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    source = saved(tmp_path / "model.pt", {"a": torch.ones(2)})
    convert_folder(source, tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["model.safetensors"]
    with pytest.raises(LoadError, match="target is not empty"):
        convert_folder(source, tmp_path / "target")

    source.write_bytes(source.read_bytes()[:-200])
    with pytest.raises(LoadError, match=r"model\.pt: is not a checkpoint"):
        convert_folder(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert not list(tmp_path.glob(".*partial"))


def test_a_target_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "model.pt", {"a": torch.ones(2)})
    with pytest.raises(LoadError, match=r"model\.pt is no folder"):
        convert_folder(source, source)
    with pytest.raises(LoadError, match="not there: No such file"):
        convert_folder(source, tmp_path / "not there" / "target")


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    """Opening it would wait for a writer."""
    os.mkfifo(tmp_path / "model.bin")
    with pytest.raises(LoadError, match="holds no checkpoint"):
        convert(tmp_path, tmp_path)
    with pytest.raises(LoadError, match="neither a checkpoint nor a folder"):
        convert(tmp_path / "model.bin", tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "model.bin"}}')
    with pytest.raises(LoadError, match=r"model\.bin: is not a regular file"):
        convert(tmp_path, tmp_path)


def test_the_checkpoint_in_a_folder_is_found_or_asked_for(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(LoadError, match=f"^{source} holds no checkpoint"):
        convert(source, tmp_path)
    saved(source / "training_args.bin", {"a": torch.ones(1)})
    saved(source / "model.pth", {"b": torch.ones(1)})
    convert(source, tmp_path)
    assert list(load_file(tmp_path / "model.safetensors")) == ["b"]
    saved(source / "ema.pth", {"b": torch.ones(1)})
    with pytest.raises(LoadError, match=r"holds 2 checkpoints .*name one of them: ema\.pth, model\.pth"):
        convert(source, tmp_path)
    with pytest.raises(LoadError, match="neither a checkpoint nor a folder"):
        convert(tmp_path / "missing", tmp_path)


class Evil:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def test_a_pickle_that_runs_a_command_is_refused_and_does_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    source = saved(tmp_path / "evil.bin", {"a": torch.ones(2), "b": Evil(canary)})
    with pytest.raises(LoadError, match=r"evil\.bin: asks for posix\.system; only tensors are read"):
        convert_folder(source, tmp_path / "target")
    assert not canary.exists()
    assert not (tmp_path / "target").exists()

    torch.load(source, weights_only=False)
    assert canary.exists()  # the file is indeed what it is said to be


def zip_of(path: Path, pickled: bytes, storages: dict[str, bytes], **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
        for name, data in entries.items():
            archive.writestr(f"archive/{name.replace('__', '/')}", data)
    return path


def opcodes(*, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0, size: int = 4) -> bytes:
    """The pickle of `{"a": tensor}` over a float32 storage of `size` elements."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(pickle.dumps(value, 2)[2:-1] for value in values) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + numbers((size,))[1:-1] + b"tQ"
    arguments = b"(" + storage + numbers((offset,))[1:-1] + numbers(shape) + numbers(stride) + b"\x89}t"
    return b"\x80\x02}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


HOSTILE = {
    "beyond storage": (opcodes(shape=(5,)), "larger than its storage of 4"),
    "beyond by offset": (opcodes(offset=1), "larger than its storage"),
    "beyond by stride": (opcodes(stride=(2,)), "larger than its storage"),
    "negative stride": (opcodes(stride=(-1,)), "not negative"),
    "expanded": (opcodes(shape=(10**12,), stride=(0,)), "larger than its storage"),
    "strides missing": (opcodes(stride=()), "1 sizes and 0 strides"),
    "storage too small": (opcodes(size=8), "has 16 bytes for 8 elements"),
    "eval": (b"\x80\x02cbuiltins\neval\nX\x01\0\0\x001\x85R.", "asks for builtins.eval"),
    "by stack": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "asks for os.system"),
    "torch.load": (b"\x80\x02ctorch.serialization\nload\n.", "asks for torch.serialization.load"),
    "instance": (b"(ios\nsystem\n.", "instruction INST"),
    "new object": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "instruction NEWOBJ"),
    "extension": (b"\x80\x02\x82\x01.", "instruction EXT1"),
    "state of a class": (b"\x80\x02ccollections\nOrderedDict\n}b.", "no dict is filled"),
    "call of a storage": (b"\x80\x02ctorch\nFloatStorage\n)R.", "builds no tensor"),
    "arguments of a dictionary": (b"\x80\x02ccollections\nOrderedDict\n]\x85R.", "builds no tensor"),
    "unhashable key": (b"\x80\x02}]Ns.", "keys of a dictionary"),
    "empty stack": (b"\x80\x02R.", "a value is missing"),
    "no mark": (b"\x80\x02Nt.", "a mark is missing"),
    "unknown memo": (b"\x80\x02h\x07.", "never stored"),
    "no end": (b"\x80\x02}", "damaged pickle"),
    "no instruction": (b"\xff", "damaged pickle"),
    "a list": (b"\x80\x02].", "holds no dictionary of tensors"),
    "a number": (b"\x80\x02}X\x01\0\0\0aK\x01s.", "'a' is not a tensor"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pickle_is_refused_with_its_cause(tmp_path: Path, case: str) -> None:
    pickled, cause = HOSTILE[case]
    source = zip_of(tmp_path / "m.bin", pickled, {"0": bytes(16)})
    with pytest.raises(LoadError, match=rf"^m\.bin: .*{cause}"):
        convert(source, tmp_path)


def test_the_hand_made_pickle_is_otherwise_right(tmp_path: Path) -> None:
    convert(zip_of(tmp_path / "m.bin", opcodes(), {"0": bytes(16)}), tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.zeros(4))


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    legacy = tmp_path / "legacy.bin"
    torch.save({"a": torch.ones(2)}, legacy, _use_new_zipfile_serialization=False)
    with pytest.raises(LoadError, match="legacy format"):
        convert(legacy, tmp_path)

    script = zip_of(tmp_path / "script.pt", opcodes(), {"0": bytes(16)}, code__x=b"")
    with pytest.raises(LoadError, match="TorchScript"):
        convert(script, tmp_path)

    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(LoadError, match=r"is not a checkpoint of torch\.save"):
        convert(plain, tmp_path)

    big_endian = zip_of(tmp_path / "big.pt", opcodes(), {"0": bytes(16)}, byteorder=b"big")
    with pytest.raises(LoadError, match="big endian"):
        convert(big_endian, tmp_path)

    with zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", opcodes())
    with pytest.raises(LoadError, match="compressed"):
        convert(tmp_path / "small.pt", tmp_path)

    missing = zip_of(tmp_path / "missing.pt", opcodes(), {})
    with pytest.raises(LoadError, match="storage '0' is missing"):
        convert(missing, tmp_path)


def test_a_flipped_bit_in_a_storage_is_found(tmp_path: Path) -> None:
    source = zip_of(tmp_path / "m.pt", opcodes(), {"0": b"\x11" * 16})
    source.write_bytes(source.read_bytes().replace(b"\x11" * 16, b"\x11" * 15 + b"\x10"))
    with pytest.raises(LoadError, match=r"m\.pt: 'archive/data/0' is damaged"):
        convert(source, tmp_path)


def test_mutated_checkpoints_raise_only_load_errors(tmp_path: Path) -> None:
    saved(tmp_path / "m.pt", {"a": torch.ones(4), "b": torch.zeros(2, 2)})
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        pickled = archive.read("m/data.pkl")
    random_ = random.Random(7)
    whole = (tmp_path / "m.pt").read_bytes()
    num_refused = 0
    for round_ in range(1500):
        data = bytearray(whole if round_ % 3 == 0 else pickled)
        for _ in range(random_.randint(1, 3)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        path = tmp_path / "mutated.pt"
        if round_ % 3 == 0:
            path.write_bytes(data)
        else:
            zip_of(path, bytes(data), {"0": bytes(16), "1": bytes(16)})
        try:
            with TorchArchive(path) as checkpoint:
                for tensor in checkpoint.tensors().values():
                    b"".join(checkpoint.read(tensor))
        except LoadError:
            num_refused += 1
    assert num_refused > 500
