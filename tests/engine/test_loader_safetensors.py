"""Safetensors checkpoints: good ones in every layout, and every way in which one can be wrong."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from inferd.engine.config import EngineArgs
from inferd.engine.errors import LoadError
from inferd.engine.layers.parallel import TensorParallel
from inferd.engine.loader.base import DefaultModelLoader, load_model
from inferd.engine.loader.names import Stage
from inferd.engine.loader.safetensors import INDEX_NAME, MAX_TENSORS, iterate_safetensors, read_header
from inferd.engine.model_config import read_model_config
from inferd.engine.models.base import BuildContext, CausalLM
from inferd.engine.models.registry import model_class
from inferd.engine.resolve import resolve
from inferd.kernels.select import build_ops

CPU = torch.device("cpu")
OPS = build_ops(CPU, torch.float32, "torch")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def make_tensors() -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens.weight": (11, 8), "lm_head.weight": (11, 8), "model.norm.weight": (8,)}
    for index in range(2):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (8,),
            f"{prefix}.post_attention_layernorm.weight": (8,),
            f"{prefix}.self_attn.q_proj.weight": (8, 8),
            f"{prefix}.self_attn.k_proj.weight": (4, 8),
            f"{prefix}.self_attn.v_proj.weight": (4, 8),
            f"{prefix}.self_attn.o_proj.weight": (8, 8),
            f"{prefix}.mlp.gate_proj.weight": (12, 8),
            f"{prefix}.mlp.up_proj.weight": (12, 8),
            f"{prefix}.mlp.down_proj.weight": (8, 12),
        }
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 0, **config: Any) -> Path:
    """0 shards: one model.safetensors; else an index and so many shards."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if not num_shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def load(folder: Path, **options: Any) -> CausalLM:
    config = resolve(EngineArgs(str(folder), dtype="float32", device="cpu"))
    return load_model(config, OPS, CPU, **options)


def loaded_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters by their layer's name, before the layers pack them."""
    config = read_model_config(folder)
    layers = range(config.num_layers)
    model = model_class(config.architecture)(config, BuildContext(OPS, "float32", CPU, TensorParallel(), layers, 16))
    loader = DefaultModelLoader(model, Stage(layers, config.num_layers, config.tie_embeddings))
    loader.load_weights(iterate_safetensors(folder), folder)
    return {name: layer.get_parameter("weight").data for name, layer in model.weight_layers() if layer.placements}


@pytest.mark.parametrize("num_shards", [0, 1, 3])
def test_every_tensor_lands(tmp_path: Path, num_shards: int) -> None:
    tensors = make_tensors()
    folder = write_folder(tmp_path / "model", tensors, num_shards)
    if num_shards:
        save_file({"stray": torch.zeros(1)}, folder / "consolidated.safetensors")
    weights = loaded_weights(folder)
    assert torch.equal(weights["model.embed_tokens"], tensors["model.embed_tokens.weight"])
    assert torch.equal(weights["lm_head"], tensors["lm_head.weight"])
    assert torch.equal(weights["model.norm"], tensors["model.norm.weight"])
    for index in range(2):
        prefix = f"model.layers.{index}"
        qkv = torch.cat([tensors[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"])
        gate_up = torch.cat([tensors[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(weights[f"{prefix}.self_attn.qkv_proj"], qkv)
        assert torch.equal(weights[f"{prefix}.mlp.gate_up_proj"], gate_up)
        for name in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
            assert torch.equal(weights[f"{prefix}.{name}"], tensors[f"{prefix}.{name}.weight"])


def test_one_file_of_another_name_is_found(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", make_tensors())
    (folder / "model.safetensors").rename(folder / "smol.safetensors")
    load(folder)


def test_tied_head_may_be_there_or_not(tmp_path: Path) -> None:
    tensors = make_tensors()
    models = [load(write_folder(tmp_path / "with", tensors, tie_word_embeddings=True))]
    embedding = tensors["model.embed_tokens.weight"]
    del tensors["lm_head.weight"]
    models.append(load(write_folder(tmp_path / "without", tensors, tie_word_embeddings=True)))
    hidden = torch.randn(3, 8)
    for model in models:
        torch.testing.assert_close(model.compute_logits(hidden), hidden @ embedding.T)


def test_derived_buffers_are_skipped(tmp_path: Path) -> None:
    tensors = make_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    load(write_folder(tmp_path / "model", tensors))


def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(write_folder(tmp_path / "model", make_tensors(), 2), progress=lambda done, total: seen.append((done, total)))
    total = 4 * sum(tensor.numel() for tensor in make_tensors().values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("num_shards", [0, 2])
def test_missing_tensor_is_named(tmp_path: Path, num_shards: int) -> None:
    tensors = make_tensors()
    del tensors[Q_PROJ]
    with pytest.raises(LoadError, match=rf"model lacks 1 tensors: {Q_PROJ}$"):
        load(write_folder(tmp_path / "model", tensors, num_shards))


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors["lm_head.weight"]
    with pytest.raises(LoadError, match=r"lm_head\.weight"):
        load(write_folder(tmp_path / "model", tensors))


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.bias", "model.layers.7.mlp.up_proj.weight", "x"])
def test_unexpected_tensor_is_named_with_its_file(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model", make_tensors() | {name: torch.zeros(8)})
    with pytest.raises(LoadError, match=rf"model\.safetensors holds tensor {name}, which"):
        load(folder)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", make_tensors() | {Q_PROJ: torch.zeros(8, 9)})
    with pytest.raises(LoadError, match=rf"model\.safetensors: tensor {Q_PROJ}: .*\[8, 9\].*\[8, 8\]"):
        load(folder)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", make_tensors() | {Q_PROJ: torch.zeros(8, 8, dtype=torch.int8)})
    with pytest.raises(LoadError, match=rf"{Q_PROJ} holds torch\.int8; quantised"):
        load(folder)


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth"])
def test_pickled_weights_name_the_way_out(tmp_path: Path, suffix: str) -> None:
    folder = write_folder(tmp_path / "model", make_tensors())
    (folder / "model.safetensors").rename(folder / f"weights.{suffix}")
    with pytest.raises(LoadError, match=rf"weights\.{suffix}.*inferd convert"):
        load(folder)


def test_no_weights_at_all(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", make_tensors())
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="holds no weights"):
        load(folder)


def test_two_gguf_files_are_ambiguous(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", make_tensors())
    for name in ("a.gguf", "b.gguf"):
        (folder / name).touch()
    with pytest.raises(LoadError, match="exactly one GGUF file, it holds 2"):
        load(folder)


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", make_tensors(), 2)
    (folder / INDEX_NAME).unlink()
    with pytest.raises(LoadError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        load(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", make_tensors(), 2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(folder)


def edit_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    for name, file_name in changes.items():
        index["weight_map"].pop(name, None)
        if file_name is not None:
            index["weight_map"][name] = file_name
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "file_name", "message"),
    [
        ("ghost", "model-00001-of-00002.safetensors", "ghost is missing from .*model-00001-of-00002.safetensors"),
        ("lm_head.weight", None, r"holds tensor lm_head\.weight, but .* puts it in nowhere"),
        ("lm_head.weight", "model-00001-of-00002.safetensors", r"lm_head\.weight is missing from .*00001-of"),
        ("lm_head.weight", "../model-00001-of-00002.safetensors", "no safetensors file of this folder"),
        ("lm_head.weight", "/etc/passwd", "no safetensors file of this folder"),
        ("lm_head.weight", "config.json", "no safetensors file of this folder"),
    ],
)
def test_index_and_shards_must_agree(tmp_path: Path, name: str, file_name: str | None, message: str) -> None:
    folder = write_folder(tmp_path / "model", make_tensors(), 2)
    edit_index(folder, **{name: file_name})
    with pytest.raises(LoadError, match=message):
        load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000])
def test_broken_index_is_named(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "model", make_tensors(), 2)
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(LoadError, match=r"index\.json"):
        load(folder)


def write_raw(path: Path, header: Any, data: bytes = b"", header_bytes: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data)
    return path


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_header_of_a_good_file(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry(4, 12), "a": entry(0, 4, [])}
    entries = read_header(write_raw(tmp_path / "x.safetensors", json.dumps(header).encode() + b"   ", bytes(12)))
    assert list(entries) == ["a", "b"]
    assert entries["b"].shape == (2,)


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"a": entry(0, 8)}, 4, "is truncated"),
        ({"a": entry(0, 8)}, 12, "bytes that belong to no tensor"),
        ({"a": entry(4, 8)}, 8, "expected to begin at 0"),
        ({"a": entry(0, 8), "b": entry(4, 8)}, 8, "tensor b lies at 4:8"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "expected to begin at 8"),
        ({"a": entry(0, 2**62, [2**60])}, 8, "is truncated"),
        ({"a": entry(0, 8, [2**62, 2**62])}, 8, "cannot have 8 bytes"),
        ({"a": entry(0, 8, [3])}, 8, "cannot have 8 bytes"),
        ({"a": entry(0, -8, [2])}, 8, "header entry of tensor a"),
        ({"a": entry(0, 8, [-2])}, 8, "header entry of tensor a"),
        ({"a": entry(0, 8, [2.5])}, 8, "header entry of tensor a"),
        ({"a": entry(0, 4, [1] * 17)}, 4, "header entry of tensor a"),
        ({"a": entry(0, 8, dtype="F31")}, 8, 'unknown dtype "F31"'),
        ({"a": entry(0, 8, dtype=4)}, 8, "header entry of tensor a"),
        ({"a": {"dtype": "F32"}}, 0, "header entry of tensor a"),
        ({"a": 1}, 0, "header entry of tensor a"),
        ({"__metadata__": {"a": 1}}, 0, "not what safetensors allows"),
        ([], 0, "not what safetensors allows"),
        (b"\xff{}", 0, "not what safetensors allows"),
        (b'{"a": ' + b"[" * 1_000_000, 0, "not what safetensors allows"),
        (b'{"a":' * 100_000, 0, "not what safetensors allows"),
        (b'"a":1,' * (4 * MAX_TENSORS + 1), 0, "more than"),
        ({"a": entry(0, 4, [1] * 1000)}, 4, "longer than"),
        (b"", 0, "not what safetensors allows"),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, header: Any, data_bytes: int, message: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, bytes(data_bytes))
    with pytest.raises(LoadError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("claimed", [100, 2**63, 2**64 - 1])
def test_header_length_beyond_the_file(tmp_path: Path, claimed: int) -> None:
    path = write_raw(tmp_path / "x.safetensors", {}, header_bytes=claimed)
    with pytest.raises(LoadError, match="does not fit"):
        read_header(path)


def test_header_length_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)  # sparse
    with pytest.raises(LoadError, match="above the limit"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_file_shorter_than_a_length(tmp_path: Path, size: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    with pytest.raises(LoadError, match="truncated"):
        read_header(tmp_path / "x.safetensors")


def test_truncation_anywhere_is_a_load_error(tmp_path: Path) -> None:
    whole = write_folder(tmp_path / "model", {"a": torch.ones(3), "b": torch.ones(2, 2)}) / "model.safetensors"
    raw = whole.read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    for size in range(len(raw)):
        (cut / "model.safetensors").write_bytes(raw[:size])
        with pytest.raises(LoadError, match=r"model\.safetensors"):
            list(iterate_safetensors(cut))


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_load_error_or_a_header(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    write_raw(path, data)
    try:
        entries = read_header(path)
    except LoadError:
        return
    assert set(entries) == set(load_file(path))


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    """Opening it would wait for a writer."""
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    with pytest.raises(LoadError, match=r"model\.safetensors is no regular file"):
        read_header(path)
