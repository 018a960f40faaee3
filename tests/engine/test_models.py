"""Every architecture against transformers, in float32, over real paged memory with poisoned free blocks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inferd.engine.attention.base import BatchGeometry
from inferd.engine.attention.context import ForwardContext, forward_context
from inferd.engine.attention.torch import TorchBackend
from inferd.engine.config import EngineArgs, EngineConfig
from inferd.engine.errors import NotSupported
from inferd.engine.layers.parallel import TensorParallel
from inferd.engine.loader.base import DefaultModelLoader, load_model
from inferd.engine.loader.names import Stage
from inferd.engine.loader.safetensors import iterate_safetensors
from inferd.engine.models.base import BuildContext, CausalLM
from inferd.engine.models.registry import model_class, supported_architectures
from inferd.engine.resolve import resolve
from inferd.kernels.common.ops import Ops
from inferd.kernels.select import build_ops

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 40
VOCAB = 101

LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=68,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
FULL = "full_attention"
GEMMA = dict(sliding_window=5, query_pre_attn_scalar=17)
GEMMA3_ROPES = {
    FULL: dict(rope_type="linear", rope_theta=900.0, factor=4.0),
    "sliding_attention": dict(rope_type="default", rope_theta=200.0),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", GEMMA | dict(attn_logit_softcapping=3.0, final_logit_softcapping=2.0)),
    "gemma2-uncapped": (
        "Gemma2",
        GEMMA | dict(attn_logit_softcapping=None, final_logit_softcapping=2.0, query_pre_attn_scalar=400),
    ),
    "gemma3": ("Gemma3", GEMMA | dict(rope_parameters=GEMMA3_ROPES, layer_types=["sliding_attention"] * 2 + [FULL])),
    "gemma3-pattern": ("Gemma3", GEMMA | dict(num_hidden_layers=6)),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-biases": ("Llama", dict(head_dim=20, attention_bias=True, mlp_bias=True)),
    "llama-one-kv-head": ("Llama", dict(num_attention_heads=3, num_key_value_heads=1, head_dim=6)),
    "llama3-rope": ("Llama", dict(rope_parameters=LLAMA3_ROPE)),
    "linear-rope": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=3.0))),
    "mistral-window": ("Mistral", dict(sliding_window=5)),
    "qwen2-some-windows": ("Qwen2", dict(sliding_window=5, use_sliding_window=True, max_window_layers=1)),
    "mistral-no-window": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True)),
    "qwen3-bias-untied": ("Qwen3", dict(attention_bias=True, head_dim=20)),
}


def make_reference(case: str, folder: Path) -> Any:
    """A random transformers model with every parameter off its neutral value, saved as safetensors."""
    family, changes = CASES[case]
    model = getattr(transformers, f"{family}ForCausalLM")
    config = model.config_class(**{**LLAMA, **changes})
    torch.manual_seed(7)
    reference = model(config).eval().float()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    reference.save_pretrained(folder)
    return reference


def make_config(folder: Path, **changes: Any) -> EngineConfig:
    return resolve(EngineArgs(str(folder), dtype="float32", device="cpu", **changes))


@pytest.fixture(scope="module")
def ops() -> Ops:
    return build_ops(CPU, torch.float32, "torch")


class PagedRows:
    """Requests over one pool of blocks: random block tables, every free slot NaN."""

    def __init__(self, model: CausalLM, ops: Ops, prompts: list[list[int]]) -> None:
        self.model = model
        self.prompts = prompts
        self.backend = TorchBackend(ops)
        blocks = list(range(1, NUM_BLOCKS))
        random.Random(3).shuffle(blocks)
        width = max(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts)
        self.tables = torch.tensor([[blocks.pop() for _ in range(width)] for _ in prompts], dtype=torch.int32)
        specs = model.kv_specs(BLOCK_SIZE)
        self.caches = {
            name: torch.full(self.backend.kv_cache_shape(NUM_BLOCKS, spec), torch.nan) for name, spec in specs.items()
        }

    def step(self, spans: list[tuple[int, int]], run: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """Tokens [begin, end) of each prompt, in one flat batch; the model's result."""
        positions = torch.cat([torch.arange(begin, end) for begin, end in spans])
        rows = torch.cat([torch.full((end - begin,), row) for row, (begin, end) in enumerate(spans)])
        slots = self.tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        geometry = BatchGeometry(
            [end - begin for begin, end in spans], [end for _, end in spans], self.tables, slots, positions
        )
        token_ids = torch.tensor(
            [token for prompt, (begin, end) in zip(self.prompts, spans, strict=True) for token in prompt[begin:end]]
        )
        context = ForwardContext(
            self.backend, {0: self.backend.build(geometry)}, {0: slots}, self.caches, dict.fromkeys(self.caches, 0)
        )
        with torch.inference_mode(), forward_context(context):
            return (run or self.model.forward)(token_ids, positions)


def random_prompts(*lengths: int) -> list[list[int]]:
    source = random.Random(11)
    return [[source.randrange(VOCAB) for _ in range(length)] for length in lengths]


@torch.no_grad()
def reference_logits(reference: Any, prompt: list[int]) -> torch.Tensor:
    return reference(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path, ops: Ops) -> None:
    reference = make_reference(case, tmp_path)
    model = load_model(make_config(tmp_path), ops, CPU)
    prompts = random_prompts(19, 1, 8)
    hidden = PagedRows(model, ops, prompts).step([(0, len(prompt)) for prompt in prompts])
    logits = model.compute_logits(hidden).split([len(prompt) for prompt in prompts])
    for prompt, row in zip(prompts, logits, strict=True):
        torch.testing.assert_close(row, reference_logits(reference, prompt), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["llama-tied", "mistral-window", "qwen3", "gemma2", "gemma3"])
def test_chunks_equal_the_whole(case: str, tmp_path: Path, ops: Ops) -> None:
    reference = make_reference(case, tmp_path)
    model = load_model(make_config(tmp_path), ops, CPU)
    (prompt,) = prompts = random_prompts(14)
    rows = PagedRows(model, ops, prompts)
    parts = [rows.step([span]) for span in [(0, 5), (5, 6), (6, 7), (7, 14)]]
    logits = model.compute_logits(torch.cat(parts))
    torch.testing.assert_close(logits, reference_logits(reference, prompt), atol=1e-5, rtol=1e-5)


def test_window_hides_older_tokens(tmp_path: Path, ops: Ops) -> None:
    make_reference("mistral-window", tmp_path)
    model = load_model(make_config(tmp_path), ops, CPU)
    first, second = prompts = random_prompts(19, 19)
    second[1:] = first[1:]
    hidden = PagedRows(model, ops, prompts).step([(0, 19), (0, 19)]).view(2, 19, -1)
    reach = 3 * (5 - 1)  # layers times what a window of 5 adds
    assert not torch.equal(hidden[0, reach], hidden[1, reach])
    torch.testing.assert_close(hidden[0, reach + 1 :], hidden[1, reach + 1 :])


def test_inputs_embeds_replace_the_embedding(tmp_path: Path, ops: Ops) -> None:
    reference = make_reference("llama-tied", tmp_path)
    model = load_model(make_config(tmp_path), ops, CPU)
    prompts = random_prompts(6)
    embeds = torch.randn(6, LLAMA["hidden_size"])
    rows = PagedRows(model, ops, prompts)
    hidden = rows.step([(0, 6)], lambda ids, positions: model.forward(ids, positions, inputs_embeds=embeds))
    with torch.no_grad():
        expected = reference(inputs_embeds=embeds[None]).logits[0]
    torch.testing.assert_close(model.compute_logits(hidden), expected, atol=1e-5, rtol=1e-5)


def load_stage(config: EngineConfig, ops: Ops, layers: range) -> CausalLM:
    model_config = config.model
    context = BuildContext(ops, "float32", CPU, TensorParallel(), layers, config.scheduler.max_model_len)
    model = model_class(model_config.architecture)(model_config, context)
    stage = Stage(layers, model_config.num_layers, model_config.tie_embeddings)
    DefaultModelLoader(model, stage).load_weights(iterate_safetensors(model_config.path), model_config.path)
    model.prepare()
    return model


@pytest.mark.parametrize("case", ["llama-tied", "llama-biases", "gemma3"])
def test_stages_equal_the_whole(case: str, tmp_path: Path, ops: Ops) -> None:
    reference = make_reference(case, tmp_path)
    config = make_config(tmp_path)
    (prompt,) = prompts = random_prompts(9)
    hidden = None
    stages = [load_stage(config, ops, layers) for layers in (range(0, 1), range(1, 2), range(2, 3))]
    for stage in stages:
        before = hidden
        hidden = PagedRows(stage, ops, prompts).step(
            [(0, 9)], lambda ids, positions, stage=stage, before=before: stage.forward(ids, positions, hidden=before)
        )
    logits = stages[-1].compute_logits(hidden)
    torch.testing.assert_close(logits, reference_logits(reference, prompt), atol=1e-5, rtol=1e-5)
    assert [list(stage.kv_specs(4)) for stage in stages] == [[f"model.layers.{i}.self_attn.attn"] for i in range(3)]


def test_kv_specs_report_each_layer(tmp_path: Path, ops: Ops) -> None:
    make_reference("llama-tied", tmp_path)
    specs = load_model(make_config(tmp_path), ops, CPU).kv_specs(16)
    assert len(specs) == 3
    assert {(s.block_size, s.num_kv_heads, s.head_size, s.dtype) for s in specs.values()} == {(16, 2, 24, "float32")}


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    reference = make_reference("qwen3", tmp_path)
    config = dataclasses.replace(make_config(tmp_path), dtype="bfloat16")
    ops = build_ops(CPU, torch.bfloat16, "torch")
    model = load_model(config, ops, CPU)
    (prompt,) = prompts = random_prompts(12)
    rows = PagedRows(model, ops, prompts)
    rows.caches = {name: cache.bfloat16() for name, cache in rows.caches.items()}
    logits = model.compute_logits(rows.step([(0, 12)]))
    assert logits.dtype == torch.float32
    expected = reference_logits(reference, prompt)
    assert (logits.float() - expected).square().mean() < 0.01 * expected.square().mean()


def test_no_second_copy_of_the_weights(tmp_path: Path, ops: Ops) -> None:
    """A kernel that packs weights of its own must be the only one that still holds them."""
    make_reference("llama-biases", tmp_path)
    packing = dataclasses.replace(
        ops, make_linear=lambda weight, bias: lambda x: x, make_logits=lambda weight: lambda x: x
    )
    model = load_model(make_config(tmp_path), packing, CPU)
    kept = [name for _, layer in model.weight_layers() for name, p in layer.named_parameters() if p.dim() == 2]
    assert kept == ["weight"]  # the embedding table's


def test_attention_outside_of_a_step_says_so(tmp_path: Path, ops: Ops) -> None:
    make_reference("llama-tied", tmp_path)
    model = load_model(make_config(tmp_path), ops, CPU)
    with pytest.raises(RuntimeError, match="outside of forward_context"):
        model.forward(torch.tensor([1]), torch.tensor([0]))


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path, ops: Ops) -> None:
    make_reference("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    prompts = random_prompts(7)

    def logits(seed: int) -> torch.Tensor:
        model = load_model(make_config(tmp_path, load_format="dummy", seed=seed), ops, CPU)
        return model.compute_logits(PagedRows(model, ops, prompts).step([(0, 7)]))

    assert torch.isfinite(logits(1)).all()
    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(NotSupported, match=r"FooForCausalLM is not supported.*LlamaForCausalLM"):
        model_class("FooForCausalLM")
    assert set(supported_architectures()) == {f"{family}ForCausalLM" for family, _ in CASES.values()}
