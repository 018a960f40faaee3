"""What an engine would find on this machine, as JSON: `python -P -m inferd.engine.about [CHOICE]`.

For whoever must not import torch. CHOICE is the setting `engine.kernels`.
"""

from __future__ import annotations

import sys
from typing import cast

import msgspec
import torch

from inferd.kernels.common.ops import KernelChoice, KernelUnavailable
from inferd.kernels.select import build_ops


class About(msgspec.Struct, frozen=True, kw_only=True):
    torch: str
    cuda: str | None  # the version that torch was built with
    num_gpus: int
    kernels: tuple[str, ...] = ()  # a sentence for each decision, for bfloat16
    kernels_error: str = ""


def about(choice: KernelChoice) -> About:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = About(torch=str(torch.__version__), cuda=torch.version.cuda, num_gpus=num_gpus)
    try:
        ops = build_ops(torch.device("cuda" if num_gpus else "cpu"), torch.bfloat16, choice)
    except KernelUnavailable as error:
        return msgspec.structs.replace(found, kernels_error=str(error))
    return msgspec.structs.replace(found, kernels=ops.decisions)


if __name__ == "__main__":
    print(msgspec.json.encode(about(cast(KernelChoice, (sys.argv[1:] or ["auto"])[0]))).decode())
