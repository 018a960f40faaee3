"""Captured decode steps against their eager twin on a card, and a whole engine against the CPU's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inferd.engine.config import EngineArgs, EngineConfig
from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup
from inferd.engine.frontend.llm import LLM
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve
from inferd.engine.testing.decode_step import decode_step
from inferd.engine.testing.model_folder import make_model_folder
from inferd.engine.worker.graphs import GraphForward, capture_sizes
from inferd.engine.worker.worker import Worker
from inferd.kernels.cuda.device import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(interpreted() or not torch.cuda.is_available(), reason="no CUDA card"),
]

BLOCK_SIZE = 128
NUM_BLOCKS = 400
MAX_NUM_SEQS = 40
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 3,
}

MakeConfig = Callable[..., EngineConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose random weights are large enough that its tokens depend on its context."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    path = make_model_folder(tmp_path_factory.mktemp("graphs") / "model", config=SHAPE)
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(path, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path / "weights")
    (path / "weights" / "model.safetensors").rename(path / "model.safetensors")
    return path


@pytest.fixture
def make_worker(folder: Path) -> Iterator[Callable[..., Worker]]:
    """With keys and values of noise; the null block is NaN."""

    def make(**changes: Any) -> Worker:
        options: dict[str, Any] = dict(
            device="cuda",
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=1024,
            max_num_batched_tokens=512,
            attention_backend="TRITON_ATTN",
            memory_fraction=0.1,
        )
        worker = Worker(resolve(EngineArgs(str(folder), **(options | changes))))
        worker.load()
        specs = worker.kv_specs()
        worker.initialize_kv_cache(KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(tuple(specs), next(iter(specs.values()))),)))
        worker.warm_up()
        for cache in worker.kv_caches.values():
            cache.normal_()
            cache[:, 0] = torch.nan
        return worker

    yield make
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
def test_a_replay_equals_the_eager_step(make_worker: Callable[..., Worker], dtype_name: str) -> None:
    """Each captured size, whole and with a row of padding; with and without shared prefixes."""
    worker = make_worker(dtype=dtype_name)
    graphs = worker.runner.forward
    assert isinstance(graphs, GraphForward)
    eager = graphs.eager
    sizes = capture_sizes(MAX_NUM_SEQS, share=True)
    assert sizes.plain[-1] == MAX_NUM_SEQS
    counts = [(size - less, share) for size, share in sizes.keys for less in (0, 1) if size > less]
    with torch.inference_mode():
        for count, share in counts:
            groups = [(4, list(range(0, count, 2))), (5, list(range(1, count, 2)))]
            shared = [(blocks, rows) for blocks, rows in groups if rows] if share else None
            lens = [641 + 9 * row % 300 for row in range(count)] if share else [1 + 23 * row for row in range(count)]
            step = decode_step(lens, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, shared=shared)
            expected, actual = eager.run(step), graphs.run(step)
            assert expected is not None
            assert actual is not None
            assert actual.greedy_ids is not None, f"{count} rows were not replayed"
            tolerance = (1e-4 if dtype_name == "float32" else 2e-2) * float(expected.logits.abs().max())
            torch.testing.assert_close(actual.logits, expected.logits, atol=tolerance, rtol=0.0)
            assert torch.equal(actual.greedy_ids, actual.logits.argmax(dim=-1))
            if dtype_name == "float32":
                assert torch.equal(actual.greedy_ids, expected.logits.argmax(dim=-1))


def prompts() -> list[list[int]]:
    """Short and long ones, three with a common beginning."""
    draw = random.Random(5)
    common = [draw.randrange(250) for _ in range(300)]
    own = [[draw.randrange(250) for _ in range(length)] for length in (1, 5, 130, 400, 3, 20, 77)]
    return [*own[:4], *(common + tokens for tokens in own[4:])]


def generate(folder: Path, params: SamplingParams, **options: Any) -> list[list[int]]:
    with LLM(folder, in_process=True, dtype="float32", max_model_len=600, max_num_seqs=8, **options) as llm:
        outputs = llm.generate(prompts(), params, progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "sampled"])
def test_tokens_equal_those_of_the_cpu(folder: Path, params: dict[str, Any]) -> None:
    settled = SamplingParams(max_tokens=64, ignore_eos=True, **params)
    expected = generate(folder, settled, device="cpu", kernels="torch")
    card = {"device": "cuda", "memory_fraction": 0.1, "max_num_batched_tokens": 256}
    assert generate(folder, settled, attention_backend="TRITON_ATTN", **card) == expected
    assert generate(folder, settled, attention_backend="TRITON_ATTN", cudagraph_mode="NONE", **card) == expected


def test_memory_is_divided_between_graphs_and_keys(folder: Path) -> None:
    """What the engine takes stays within its share, graphs included."""
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    with LLM(folder, in_process=True, device="cuda", memory_fraction=0.1, max_num_seqs=64) as llm:
        llm.generate(prompts(), SamplingParams(max_tokens=8, temperature=0.0), progress=False)
        torch.cuda.synchronize()
        used = free_before - torch.cuda.mem_get_info()[0]
    assert used <= 0.1 * total + (64 << 20)
    assert used >= 0.07 * total
