"""Adapters on a card: a whole engine against the CPU's, with decode steps captured and not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from inferd.engine.frontend.llm import LLM
from inferd.engine.frontend.lora import LoRARequest
from inferd.engine.params import SamplingParams
from inferd.engine.testing.random_adapter import make_random_adapter
from inferd.engine.testing.random_checkpoint import make_random_checkpoint
from inferd.kernels.cuda.device import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(interpreted() or not torch.cuda.is_available(), reason="no CUDA card"),
]

SHAPE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    model = make_random_checkpoint(folder / "model", num_hidden_layers=2, **SHAPE)
    for number, rank in enumerate((4, 8, 16), start=1):
        targets = ["q_proj", "v_proj"] if number == 2 else ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
        make_random_adapter(folder / str(number), model, rank=rank, targets=targets, seed=number)
    return folder


def answers(folder: Path, **options: Any) -> tuple[list[list[int]], list[str]]:
    """Of prompts of many lengths, with each adapter and with none; and what the engine decided."""
    draw = random.Random(0)
    prompts = [[draw.randrange(250) for _ in range(draw.choice([1, 5, 40, 90]))] for _ in range(24)]
    adapters = [LoRARequest(str(at % 4), str(folder / str(at % 4))) if at % 4 else None for at in range(24)]
    fixed: dict[str, Any] = dict(dtype="float32", max_model_len=160, enable_lora=True, max_num_seqs=20)
    with LLM(folder / "model", in_process=True, **(fixed | options)) as llm:
        outputs = llm.generate(prompts, PARAMS, lora_request=adapters, progress=False)
        decisions = llm._engine._client.ready.decisions
    return [output.outputs[0].token_ids for output in outputs], decisions


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(max_loras=3, max_num_batched_tokens=64),
        dict(max_loras=2, cudagraph_mode="NONE"),
        dict(max_loras=3, kernels="torch", cudagraph_mode="NONE"),
    ],
    ids=["one place", "captured", "eager", "plain kernels"],
)
def test_tokens_equal_those_of_the_cpu(folder: Path, options: dict[str, Any]) -> None:
    expected, _ = answers(folder, device="cpu", kernels="torch", max_loras=3)
    actual, decisions = answers(folder, device="cuda", kv_cache_bytes=1 << 28, **options)
    same = sum(one == other for one, other in zip(actual, expected, strict=True))
    assert same >= len(expected) - 1, f"{same} of {len(expected)}"  # float32 sums in another order may tip one
    said = [sentence for sentence in decisions if sentence.startswith("lora: ")][-1]
    if options.get("kernels") == "torch":
        assert said == "lora: plain torch"
    elif "cudagraph_mode" in options:
        assert said == "lora: own Triton kernels"
    else:
        assert said == "lora: own Triton kernels; decode steps with adapters are captured too"
