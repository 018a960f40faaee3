"""A complete tiny GGUF model, written with the `gguf` package. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, LAYERS = 32, 4, 2, 8, 64, 2
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ hello")
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

Tensors = Mapping[str, NDArray[np.float32]]


def tiny_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary and a two-layer model; `changes` are keys with `.` written as `__`, None removes one."""
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INTERMEDIATE,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
    }
    metadata |= byte_level_vocabulary()
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def byte_level_vocabulary() -> dict[str, Any]:
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tiny_tensors(*, num_tokens: int = 264, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights of `tiny_metadata`'s Llama with a tied head, under GGUF's names and in GGUF's order of rows."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (num_tokens, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_SIZE, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_SIZE, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_SIZE, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_SIZE),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INTERMEDIATE, HIDDEN),
            "ffn_up": (INTERMEDIATE, HIDDEN),
            "ffn_down": (HIDDEN, INTERMEDIATE),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {name: random.normal(scale=0.1, size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors, quantization: str = "F32") -> Path:
    """Writes the file; matrices are stored as `quantization`, vectors as F32. Returns `path`."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[quantization if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
