"""What the kernels ask of the card they run on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Card:
    """`num_sms`: multiprocessors. `dependent_launch`: a kernel may start while the one before it drains (Hopper on)."""

    num_sms: int
    capability: tuple[int, int]
    dependent_launch: bool


INTERPRETER = Card(num_sms=4, capability=(9, 0), dependent_launch=False)  # Triton's, on tensors of the CPU


@lru_cache
def card(device: torch.device) -> Card:
    """The card of a tensor; tensors of the CPU reach a kernel only through Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return Card(properties.multi_processor_count, capability, capability >= (9, 0))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which takes tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
