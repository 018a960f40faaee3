"""Weights of a GGUF file under Hugging Face's names, dequantised one tensor at a time.

Llama files store the rows of q and k so that the two halves of a rotary pair are neighbours, and Gemma files store
1 + w for a norm weight w. Both are undone here (llama.cpp's `convert_hf_to_gguf.py` does them, in `LlamaModel.permute`
and `Gemma2Model.modify_tensors`), so a model sees its original checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from inferd.engine.config import ModelConfig
from inferd.engine.loader.gguf_header import GGUFHeader, TensorInfo, read_header
from inferd.engine.loader.gguf_names import GGUFArchitecture, architecture_of, checkpoint_name

_CHUNK_ELEMENTS = 1 << 17  # 512 KB of float32: larger chunks fall out of the cache, smaller ones cost Python time
_MAX_THREADS = 8


def iterate_gguf(path: Path, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name as in a Hugging Face checkpoint, tensor of `dtype` on the CPU), in the file's order.

    Dequantises in float32 and rounds once to `dtype`. A tied head has no tensor of its own.
    Raises LoadError naming the file, the tensor and the cause.
    """
    header = read_header(path)
    architecture = architecture_of(header)
    heads = _checked_heads(header, architecture, config)
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="gguf") as pool:
        for info in header.tensors:
            name = checkpoint_name(architecture, info.name, config.num_layers)
            if name is None:
                continue
            offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
            tensor = _dequantised(header, info, raw, dtype, pool, offset)
            projection = name.rsplit(".", 2)[1]
            if architecture.permuted_qk and projection in heads:
                tensor = _unpermuted(header, info, tensor, heads[projection])
            yield name, tensor


def _checked_heads(header: GGUFHeader, architecture: GGUFArchitecture, config: ModelConfig) -> dict[str, int]:
    """Heads of q and k by the projection's name, after a look whether config.json speaks of the same model."""
    prefix = architecture.name
    num_heads = header.integer(f"{prefix}.attention.head_count")
    found = {
        "architecture": (config.architecture in architecture.hf_names, config.architecture, prefix),
        "layers": _pair(config.num_layers, header.integer(f"{prefix}.block_count")),
        "hidden size": _pair(config.hidden_size, header.integer(f"{prefix}.embedding_length")),
        "heads": _pair(config.num_heads, num_heads),
        "KV heads": _pair(config.num_kv_heads, header.integer(f"{prefix}.attention.head_count_kv", num_heads)),
    }
    for what, (same, ours, theirs) in found.items():
        if not same:
            raise header.error(what, f"config.json says {ours}, the file {theirs}; import the file anew")
    return {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}


def _pair(ours: int, theirs: int) -> tuple[bool, int, int]:
    return ours == theirs, ours, theirs


def _dequantised(
    header: GGUFHeader,
    info: TensorInfo,
    raw: NDArray[np.uint8],
    dtype: torch.dtype,
    pool: ThreadPoolExecutor,
    offset: float,
) -> torch.Tensor:
    """Less `offset`, which is taken off before the values are rounded to `dtype`."""
    kind = gguf.GGMLQuantizationType[info.type.name]
    stored = raw[info.offset_bytes : info.offset_bytes + info.num_bytes]
    out = torch.empty(prod(info.shape), dtype=dtype)
    chunk_blocks = _CHUNK_ELEMENTS // info.type.block_size
    num_blocks = info.num_bytes // info.type.block_bytes

    def convert(first: int) -> None:
        last = min(first + chunk_blocks, num_blocks)
        with np.errstate(all="ignore"):  # a hostile scale may overflow
            # One flat row: dequantize works on 16 rows at a time, which is slow for short ones.
            values = gguf.dequantize(stored[first * info.type.block_bytes : last * info.type.block_bytes], kind)
        # F32 comes back as a view of the read-only file, which torch would warn about.
        values = values if values.flags.writeable else values.copy()
        if offset:
            values -= np.float32(offset)
        out[first * info.type.block_size : last * info.type.block_size] = torch.from_numpy(values)

    try:
        list(pool.map(convert, range(0, num_blocks, chunk_blocks)))
    except NotImplementedError as error:
        raise header.error(f"tensor {info.name}", f"type {info.type.name} cannot be dequantised") from error
    return out.view(info.shape)


def _unpermuted(header: GGUFHeader, info: TensorInfo, tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from (pair, half) to (half, pair) order; works on weights and biases."""
    if tensor.shape[0] % (2 * num_heads):
        raise header.error(f"tensor {info.name}", f"{tensor.shape[0]} rows are not {num_heads} heads of even size")
    rows = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)
