"""What every layer is built for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferd.engine.config import Dtype
from inferd.engine.layers.parallel import TensorParallel
from inferd.kernels.common.ops import Ops

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class BuildTarget:
    """The operations that a layer calls, and where and in which precision its weights live."""

    ops: Ops
    dtype: Dtype
    device: torch.device
    tp: TensorParallel

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]
