"""Weights out of a GGUF file: names, shapes, order of rows, every quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from inferd.engine.config import ModelConfig, RopeConfig
from inferd.engine.errors import LoadError
from inferd.engine.loader import gguf as gguf_loader
from inferd.engine.loader.gguf import iterate_gguf
from inferd.engine.loader.gguf_header import GGML_TYPES
from inferd.engine.testing import tiny_gguf
from inferd.engine.testing.tiny_gguf import tiny_metadata, tiny_tensors, write_gguf

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
UNQUANTIZED = {"F32", "F16"}
DEQUANTIZABLE = [kind.name for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits]
NOT_DEQUANTIZABLE = [kind.name for kind in GGML_TYPES.values() if kind.name not in {*DEQUANTIZABLE, *UNQUANTIZED}]


def model_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "path": Path("tiny"),
        "architecture": "LlamaForCausalLM",
        "vocab_size": 264,
        "hidden_size": tiny_gguf.HIDDEN,
        "intermediate_size": tiny_gguf.INTERMEDIATE,
        "num_layers": tiny_gguf.LAYERS,
        "num_heads": tiny_gguf.HEADS,
        "num_kv_heads": tiny_gguf.KV_HEADS,
        "head_size": tiny_gguf.HEAD_SIZE,
        "norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_position": 128,
        "tie_embeddings": True,
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_window": None,
        "eos_token_ids": (2,),
        "bos_token_id": 1,
        "checkpoint_dtype": "bfloat16",
    }
    return ModelConfig(**(fields | changes))


def load(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, torch.Tensor]:
    return dict(iterate_gguf(path, model_config(**changes), dtype))


def as_llama_stores(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Row 2 i + s of a head's stored rows is row i + s * half of the original ones."""
    stored = np.empty_like(weight)
    head_size = weight.shape[0] // num_heads
    for row in range(weight.shape[0]):
        head, inside = divmod(row, head_size)
        half, index = divmod(inside, head_size // 2)
        stored[head * head_size + 2 * index + half] = weight[row]
    return stored


def test_llama_rows_of_q_and_k_come_back_in_their_original_order(tmp_path: Path) -> None:
    original = tiny_tensors() | {"blk.0.attn_q.bias": np.arange(32, dtype=np.float32)}
    stored = dict(original)
    for name, heads in (("attn_q.weight", 4), ("attn_k.weight", 2), ("attn_q.bias", 4)):
        stored[f"blk.0.{name}"] = as_llama_stores(original[f"blk.0.{name}"], heads)
    weights = load(write_gguf(tmp_path / "m.gguf", tiny_metadata(), stored))

    prefix = "model.layers.0.self_attn"
    for projection in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias"):
        name = f"blk.0.attn_{projection[0]}.{projection.split('.')[1]}"
        assert torch.equal(weights[f"{prefix}.{projection}"], torch.from_numpy(original[name]))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_are_left_as_they_are(tmp_path: Path, architecture: str) -> None:
    tensors = tiny_tensors()
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(architecture), tensors)
    weights = load(path, architecture=ARCHITECTURES[architecture])
    stored = torch.from_numpy(tensors["blk.1.attn_q.weight"])
    assert torch.equal(weights["model.layers.1.self_attn.q_proj.weight"], stored)


def test_names_are_those_of_hugging_face(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    norms = {f"blk.{layer}.attn_{x}_norm.weight": np.ones(8, np.float32) for layer in range(2) for x in "qk"}
    head = {"output.weight": np.ones((264, 32), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata("qwen3"), tiny_tensors() | norms | head)
    weights = load(path, architecture="Qwen3ForCausalLM")

    config = Qwen3Config(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    expected = {name: tensor.shape for name, tensor in Qwen3ForCausalLM(config).state_dict().items()}
    assert {name: tensor.shape for name, tensor in weights.items()} == expected


@pytest.mark.parametrize("kind", [*DEQUANTIZABLE, "F16", "F32"])
def test_every_type_of_the_gguf_package_comes_out_as_it_says(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_loader, "_CHUNK_ELEMENTS", 1024)
    quantization = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    row_bytes = 256 // block_size * block_bytes
    raw = np.random.default_rng(7).integers(0, 256, (37, row_bytes), dtype=np.uint8)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    for key in ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv"):
        writer.add_uint32(f"qwen2.{key}", tiny_metadata("qwen2")[f"qwen2.{key}"])
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_shape=raw.shape, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, quantization).copy())
    assert expected.shape == (37, 256)
    for dtype in (torch.float32, torch.bfloat16):
        weights = load(path, dtype, architecture="Qwen2ForCausalLM")
        loaded = weights["model.layers.0.mlp.down_proj.weight"]
        assert loaded.dtype is dtype
        torch.testing.assert_close(loaded, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", NOT_DEQUANTIZABLE)
def test_a_type_without_weights_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(), {"output_norm.weight": np.zeros(256, np.float32)})
    data = bytearray(path.read_bytes())
    entry = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    data[entry : entry + 4] = int(quantization).to_bytes(4, "little")
    path.write_bytes(bytes(data) + bytes(256 // block_size * block_bytes))
    with pytest.raises(LoadError, match=rf"m\.gguf: tensor output_norm\.weight: type {kind} cannot be dequantised"):
        load(path)


def test_a_derived_table_holds_no_weights(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"rope_freqs.weight": np.ones(4, np.float32)}
    weights = load(write_gguf(tmp_path / "m.gguf", tiny_metadata(), tensors))
    assert len(weights) == len(tensors) - 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("blk.0.attn_qkv.weight", "'blk.0.attn_qkv.weight' is not part of the architecture llama"),
        ("blk.0.attn_q_norm.weight", "'blk.0.attn_q_norm.weight' is not part of the architecture llama"),
        ("blk.2.attn_q.weight", "'blk.2.attn_q.weight' lies beyond the model's 2 layers"),
        ("v.patch_embd.weight", "'v.patch_embd.weight' is not part of the architecture llama"),
    ],
)
def test_a_foreign_tensor_is_named(tmp_path: Path, extra: str, message: str) -> None:
    tensors = tiny_tensors() | {extra: np.ones((32, 32), np.float32)}
    with pytest.raises(LoadError, match=message):
        load(write_gguf(tmp_path / "m.gguf", tiny_metadata(), tensors))


@pytest.mark.parametrize(
    ("metadata", "config", "message"),
    [
        (tiny_metadata("phi3"), {}, "'phi3' is not supported; supported: gemma2, gemma3, llama, qwen2, qwen3"),
        (tiny_metadata(split__count=3), {}, "one of 3 parts is not supported"),
        (tiny_metadata(), {"num_layers": 3}, "layers: config.json says 3, the file 2"),
        (tiny_metadata(), {"num_heads": 8}, "heads: config.json says 8, the file 4"),
        (tiny_metadata(), {"architecture": "Qwen3ForCausalLM"}, "architecture: config.json says Qwen3ForCausalLM"),
        (tiny_metadata(llama__attention__head_count=[4, 2]), {}, "head_count: must be an integer"),
    ],
)
def test_a_file_that_is_not_this_model_is_refused(
    tmp_path: Path, metadata: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        load(write_gguf(tmp_path / "m.gguf", metadata, tiny_tensors()), **config)


def test_rows_that_are_not_whole_heads_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"blk.0.attn_q.weight": np.ones((30, 32), np.float32)}
    with pytest.raises(LoadError, match="30 rows are not 4 heads of even size"):
        load(write_gguf(tmp_path / "m.gguf", tiny_metadata(), tensors))
