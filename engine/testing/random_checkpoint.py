"""A tiny decoder's checkpoint with random weights, in the files that real ones have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from inferd.engine.config import ModelConfig
from inferd.engine.model_config import read_model_config
from inferd.engine.testing.model_folder import make_model_folder

SPREAD = 0.3  # far enough apart that rounding does not decide between two tokens
ODD_VOCAB_SIZE = 271  # prime, and above the tokenizer's


def make_random_checkpoint(path: Path, seed: int = 0, **config: Any) -> Path:
    """A folder as `make_model_folder` writes it with these keys of `config.json`, and float32 weights; returns `path`.

    Llama and Qwen3 architectures.
    """
    make_model_folder(path, config={"vocab_size": ODD_VOCAB_SIZE, "max_position_embeddings": 256} | config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in _shapes(read_model_config(path))}
    save_file(tensors, path / "model.safetensors")
    return path


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator) * SPREAD
    return noise + 1.0 if "norm" in name else noise


def _shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = model.hidden_size
    yield "model.embed_tokens.weight", (model.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not model.tie_embeddings:
        yield "lm_head.weight", (model.vocab_size, hidden)
    for index in range(model.num_layers):
        for name, shape in _layer_shapes(model):
            yield f"model.layers.{index}.{name}", shape


def _layer_shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    linears = [
        ("self_attn.q_proj", q_size, hidden, model.attention_bias),
        ("self_attn.k_proj", kv_size, hidden, model.attention_bias),
        ("self_attn.v_proj", kv_size, hidden, model.attention_bias),
        ("self_attn.o_proj", hidden, q_size, model.output_bias),
        ("mlp.gate_proj", inner, hidden, model.mlp_bias),
        ("mlp.up_proj", inner, hidden, model.mlp_bias),
        ("mlp.down_proj", hidden, inner, model.mlp_bias),
    ]
    for name, num_outputs, num_inputs, has_bias in linears:
        yield f"{name}.weight", (num_outputs, num_inputs)
        if has_bias:
            yield f"{name}.bias", (num_outputs,)
    norms = ("input_layernorm", hidden), ("post_attention_layernorm", hidden)
    head_norms = (("self_attn.q_norm", model.head_size), ("self_attn.k_norm", model.head_size)) if model.qk_norm else ()
    for name, size in (*norms, *head_norms):
        yield f"{name}.weight", (size,)
