"""How a GGUF file's weights are stored, in the words that its users know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from inferd.engine.loader.gguf_header import GGUFHeader

# `general.file_type`, as https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h numbers it.
FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
}


def quantisation_of(header: GGUFHeader) -> str | None:
    """What the file says of itself, else the type of most of its bytes; None for a file without tensors."""
    file_type = header.metadata.get("general.file_type")
    if type(file_type) is int and file_type in FILE_TYPES:
        return FILE_TYPES[file_type]
    num_bytes: Counter[str] = Counter()
    for tensor in header.tensors:
        num_bytes[tensor.type.name] += tensor.num_bytes
    return max(num_bytes, key=lambda name: num_bytes[name], default=None)
