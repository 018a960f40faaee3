"""Options and machine → configuration, as a table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.config import EngineArgs, EngineConfig
from inferd.engine.errors import ConfigError, NotSupported
from inferd.engine.resolve import Hardware, resolve

CPU = Hardware(num_cpus=2, has_cuda=False, fast_bfloat16=True)
OLD_CPU = Hardware(num_cpus=2, has_cuda=False, fast_bfloat16=False)
CUDA = Hardware(num_cpus=16, has_cuda=True, fast_bfloat16=True)

CONFIG = """{"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, "eos_token_id": 2}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(CONFIG)
    return tmp_path


def run(folder: Path, hardware: Hardware = CPU, **options: Any) -> EngineConfig:
    return resolve(EngineArgs(model=str(folder), **options), hardware)


@pytest.mark.parametrize(
    ("hardware", "options", "device", "dtype", "block_size", "budget"),
    [
        (CPU, {}, "cpu", "bfloat16", 16, 2048),
        (OLD_CPU, {}, "cpu", "float32", 16, 2048),
        (CUDA, {}, "cuda", "bfloat16", 128, 8192),
        (CUDA, {"device": "cpu", "dtype": "float32"}, "cpu", "float32", 16, 2048),
        (CPU, {"block_size": 4, "max_num_batched_tokens": 7}, "cpu", "bfloat16", 4, 7),
    ],
)
def test_what_auto_becomes(
    folder: Path, hardware: Hardware, options: dict[str, Any], device: str, dtype: str, block_size: int, budget: int
) -> None:
    config = run(folder, hardware, **options)
    assert (config.device, config.dtype, config.cache.block_size) == (device, dtype, block_size)
    assert config.scheduler.max_num_batched_tokens == budget
    assert config.scheduler.max_model_len == 512


def test_each_settled_auto_is_said(folder: Path) -> None:
    said = " ".join(run(folder).decisions)
    for name in ("device=cpu", "dtype=bfloat16", "max_model_len=512", "max_num_seqs="):
        assert name in said
    assert "dtype" not in " ".join(run(folder, dtype="float32").decisions)


def test_weights_decide_the_format(folder: Path) -> None:
    assert run(folder).load_format == "safetensors"
    (folder / "model.gguf").touch()
    assert run(folder).load_format == "gguf"
    assert run(folder, load_format="dummy").load_format == "dummy"


def test_config_is_frozen(folder: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        run(folder).dtype = "float32"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"device": "cuda"}, ConfigError, "device=cuda"),
        ({"max_model_len": 513}, ConfigError, "max_model_len=513"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
        ({"block_size": 24}, ConfigError, "block_size=24"),
        ({"memory_fraction": 1.5}, ConfigError, "memory_fraction"),
        ({"tensor_parallel_size": 2}, NotSupported, "tensor_parallel_size=2"),
        ({"attention_backend": "FLASHINFER"}, ConfigError, "attention_backend=FLASHINFER"),
    ],
)
def test_what_cannot_hold_is_named(folder: Path, options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        run(folder, **options)
