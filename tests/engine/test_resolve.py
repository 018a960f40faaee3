"""Options and machine → configuration, as a table."""

from __future__ import annotations

import dataclasses
import json
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


def test_a_seed_is_drawn_at_each_start_unless_it_is_given(folder: Path) -> None:
    drawn = [run(folder) for _ in range(2)]
    assert drawn[0].seed != drawn[1].seed
    assert any(decision.startswith(f"seed={drawn[0].seed}: ") for decision in drawn[0].decisions)
    assert {config.weights_seed for config in drawn} == {0}  # a dummy model stays the same model
    given = run(folder, seed=7)
    assert (given.seed, given.weights_seed) == (7, 7)
    assert not any(decision.startswith("seed=") for decision in given.decisions)


@pytest.mark.parametrize(
    ("hardware", "wanted", "mode"),
    [(CPU, "auto", "NONE"), (CUDA, "auto", "FULL_DECODE_ONLY"), (CUDA, "FULL", "FULL"), (CPU, "NONE", "NONE")],
)
def test_cuda_graphs_are_for_cards(folder: Path, hardware: Hardware, wanted: str, mode: str) -> None:
    assert run(folder, hardware, cudagraph_mode=wanted).cudagraph_mode == mode


def test_each_settled_auto_is_said(folder: Path) -> None:
    said = " ".join(run(folder).decisions)
    for name in ("device=cpu", "dtype=bfloat16", "max_model_len=512", "max_num_seqs=", "cudagraph_mode=NONE"):
        assert name in said
    assert "dtype" not in " ".join(run(folder, dtype="float32").decisions)


def test_weights_decide_the_format(folder: Path) -> None:
    assert run(folder).load_format == "safetensors"
    (folder / "model.gguf").touch()
    assert run(folder).load_format == "gguf"
    assert run(folder, load_format="dummy").load_format == "dummy"


def test_ranks_have_a_process_each_and_share_the_processors(folder: Path) -> None:
    alone, divided = run(folder), run(folder, tensor_parallel_size=2, step_timeout_s=5.0)
    assert (alone.executor, alone.num_threads) == ("uniproc", 2)
    assert (divided.executor, divided.num_threads) == ("multiproc", 1)
    assert divided.parallel.step_timeout_s == 5.0
    assert run(folder, tensor_parallel_size=4, num_threads=2).num_threads == 1
    assert run(folder, executor="multiproc").num_threads == 2


def test_ranks_that_cannot_be(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 needs a card for each rank, this machine has 1"):
        run(folder, CUDA, tensor_parallel_size=2)
    assert run(folder, dataclasses.replace(CUDA, num_cards=2), tensor_parallel_size=2).executor == "multiproc"
    heads = dict(num_attention_heads=12, num_key_value_heads=4, head_dim=8, intermediate_size=132)
    (folder / "config.json").write_text(json.dumps(json.loads(CONFIG) | heads))
    with pytest.raises(ConfigError, match="num_kv_heads=4: one must be a multiple of the other"):
        run(folder, tensor_parallel_size=6)


def test_scheduling_options_reach_the_scheduler(folder: Path) -> None:
    plain = run(folder).scheduler
    assert (plain.policy, plain.long_prefill_token_threshold, plain.max_concurrent_batches) == ("fair", 0, 1)
    options: dict[str, Any] = dict(
        scheduling_policy="priority", long_prefill_token_threshold=512, async_scheduling=True
    )
    changed = run(folder, **options).scheduler
    assert (changed.policy, changed.long_prefill_token_threshold, changed.max_concurrent_batches) == (
        "priority",
        512,
        2,
    )


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
        ({"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size must be at least 1"),
        ({"tensor_parallel_size": 3}, ConfigError, "tensor_parallel_size=3 does not divide this model's num_heads=4"),
        ({"tensor_parallel_size": 2, "executor": "uniproc"}, ConfigError, "executor=uniproc runs one rank, not 2"),
        ({"step_timeout_s": 0.0}, ConfigError, "step_timeout_s"),
        ({"scheduling_policy": "lifo"}, ConfigError, "scheduling_policy=lifo is not known; choose one of fair, fcfs"),
        ({"long_prefill_token_threshold": -1}, ConfigError, "long_prefill_token_threshold must be 0"),
        ({"attention_backend": "FLASHINFER"}, ConfigError, "attention_backend=FLASHINFER"),
        ({"cudagraph_mode": "PIECEWISE"}, NotSupported, "cudagraph_mode=PIECEWISE is not supported"),
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, NotSupported, "cudagraph_mode=FULL_AND_PIECEWISE"),
        ({"cudagraph_mode": "full"}, ConfigError, "cudagraph_mode=full is not known"),
        ({"cudagraph_mode": "FULL"}, ConfigError, "cudagraph_mode=FULL needs a CUDA device"),
    ],
)
def test_what_cannot_hold_is_named(folder: Path, options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        run(folder, **options)
