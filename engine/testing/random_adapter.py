"""PEFT adapters with random weights for a checkpoint, and the checkpoint with one of them merged into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from inferd.engine.lora.config import CONFIG_NAME, LINEARS, WEIGHTS_NAME, read_adapter_config

SPREAD = 0.25  # of what an adapter adds to a matrix, beside the checkpoint's own 0.3


def make_random_adapter(
    path: Path, model: Path, *, rank: int = 8, targets: Iterable[str] = LINEARS, seed: int = 0, **config: Any
) -> Path:
    """A folder as PEFT writes it, for a model that `make_random_checkpoint` made; returns `path`.

    `config`: further fields of adapter_config.json.
    """
    wanted = tuple(targets)
    fields = dict(peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=list(wanted))
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_NAME).write_text(json.dumps(fields | config), encoding="utf-8")
    scale = read_adapter_config(path, rank).scale
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        matrix = name.removesuffix(".weight")
        if matrix.rpartition(".")[2] not in wanted or weight.dim() != 2:
            continue
        num_outputs, num_inputs = weight.shape
        prefix = f"base_model.model.{matrix}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, num_inputs, generator=generator)
        spread = SPREAD / rank**0.5 / scale
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_outputs, rank, generator=generator) * spread
    save_file(tensors, path / WEIGHTS_NAME)
    return path


def merge_adapter(path: Path, model: Path, adapter: Path) -> Path:
    """The model's folder again, with `W + scale * B @ A` in place of each W; returns `path`."""
    shutil.copytree(model, path)
    scale = read_adapter_config(adapter, 1 << 20).scale
    factors = load_file(adapter / WEIGHTS_NAME)
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in factors:
            product = factors[f"{prefix}.lora_B.weight"].double() @ factors[f"{prefix}.lora_A.weight"].double()
            tensors[name] = (tensors[name].double() + scale * product).float()
    save_file(tensors, path / "model.safetensors")
    return path
