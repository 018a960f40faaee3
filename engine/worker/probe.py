"""Reads of this machine's memory."""

from __future__ import annotations

import psutil
import torch

from inferd.engine.worker.memory import MemoryReading


def read_host() -> MemoryReading:
    memory = psutil.virtual_memory()
    return MemoryReading(memory.available, memory.total)


def read_card(device: torch.device) -> MemoryReading:
    """After all that was launched is done. What torch holds in reserve counts as taken."""
    torch.cuda.synchronize(device)
    return MemoryReading(*torch.cuda.mem_get_info(device))
