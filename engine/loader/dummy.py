"""Random weights in place of a checkpoint: for timing and for tests that need no meaning."""

from __future__ import annotations

import zlib

import torch

from inferd.engine.models.base import Model

SPREAD = 0.05  # small enough that activations keep their size over many layers


def fill_randomly(model: Model, seed: int) -> None:
    """Norm weights 1, the rest uniform around 0. Each parameter depends on `seed` and its name alone."""
    for layer_name, layer in model.weight_layers():
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.dim() == 1 and name == "weight":
                parameter.data.fill_(1.0)
                continue
            key = zlib.crc32(f"{seed}:{layer_name}.{name}".encode())  # 32 bits are all that a CPU generator looks at
            generator = torch.Generator(parameter.device).manual_seed(key)
            parameter.data.uniform_(-SPREAD, SPREAD, generator=generator)
