"""A GGUF file's hyperparameters → config.json and generation_config.json in Hugging Face's terms."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from inferd.engine.importer.gemma import SERVED_KEYS, gemma_json
from inferd.engine.importer.metadata import Fields, shortest_float32
from inferd.engine.importer.vocabulary import Vocabulary
from inferd.engine.loader.gguf_header import GGUFHeader
from inferd.engine.loader.gguf_names import ROPE_FACTORS, GGUFArchitecture

# GGUF keeps only the factors that Llama 3's rope scaling yields; these are its other terms in all released models.
_LLAMA3_TERMS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MAX_ROPE_FACTORS = 1024


def config_json(
    header: GGUFHeader, architecture: GGUFArchitecture, vocabulary: Vocabulary, source: Path
) -> dict[str, Any]:
    """Raises LoadError naming the key that is missing, wrong or not supported."""
    fields = Fields(header, architecture.name)
    is_gemma = architecture.name.startswith("gemma")
    fields.refuse_unsupported(SERVED_KEYS if is_gemma else ())
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_size = _head_size(fields, hidden_size, num_heads)
    window = None if is_gemma else _sliding_window(fields)
    config = {
        "architectures": [architecture.hf_names[-1 if window else 0]],
        "model_type": "mistral" if window else architecture.name,
        "vocab_size": _vocab_size(header, vocabulary),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.integer("context_length"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields, source, head_size),
        "sliding_window": window,
        "attention_bias": header.tensor("blk.0.attn_q.bias") is not None,
        "mlp_bias": header.tensor("blk.0.ffn_up.bias") is not None,
        "tie_word_embeddings": header.tensor("output.weight") is None,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": _one_or_list(vocabulary.end_ids),
        "pad_token_id": vocabulary.pad_id,
        "torch_dtype": "bfloat16",
    }
    return config | (gemma_json(fields, architecture) if is_gemma else {"hidden_act": "silu"})


def generation_config_json(vocabulary: Vocabulary) -> dict[str, Any]:
    ids = {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": _one_or_list(vocabulary.end_ids),
        "pad_token_id": vocabulary.pad_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def _head_size(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_size = fields.integer("attention.key_length", hidden_size // num_heads or 1)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, head_size) != head_size:
            raise fields.header.error(
                f"metadata {fields.key(name)}", f"a value other than the head size {head_size} is not supported"
            )
    return head_size


def _sliding_window(fields: Fields) -> int | None:
    name = "attention.sliding_window"
    if not fields.has(name) or fields.header.integer(fields.key(name)) == 0:
        return None
    if fields.key(name) != "llama.attention.sliding_window":
        raise fields.header.error(f"metadata {fields.key(name)}", "is not supported for this architecture")
    return fields.integer(name)


def _vocab_size(header: GGUFHeader, vocabulary: Vocabulary) -> int:
    embedding = header.tensor("token_embd.weight")
    if embedding is None:
        raise header.error("tensor token_embd.weight", "is missing")
    num_rows = embedding.shape[0]
    if num_rows < len(vocabulary.tokens):
        raise header.error("tensor token_embd.weight", f"has {num_rows} rows for {len(vocabulary.tokens)} tokens")
    return num_rows


def _rope_scaling(fields: Fields, source: Path, head_size: int) -> dict[str, Any] | None:
    kind = fields.header.text(fields.key("rope.scaling.type"), "none")
    has_factors = fields.header.tensor(ROPE_FACTORS) is not None
    if kind == "none":
        return _llama3_scaling(fields, source, head_size) if has_factors else None
    if kind != "linear" or has_factors:
        with_factors = f" together with {ROPE_FACTORS}" if has_factors else "; supported: none, linear"
        raise fields.header.error(
            f"metadata {fields.key('rope.scaling.type')}", f"{kind[:40]!r} is not supported{with_factors}"
        )
    return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}


def _llama3_scaling(fields: Fields, source: Path, head_size: int) -> dict[str, Any]:
    """Finds the terms whose factors are those of the file."""
    factors = _read_rope_factors(fields.header, source)
    factor = shortest_float32(max(factors, default=0.0))
    expected = _llama3_factors(fields.number("rope.freq_base", 10000.0), factor, head_size) if factor > 0 else []
    same = len(factors) == len(expected) and all(
        math.isclose(ours, theirs, rel_tol=1e-4) for ours, theirs in zip(expected, factors, strict=True)
    )
    if not same:
        raise fields.header.error(f"tensor {ROPE_FACTORS}", "is not what Llama 3's rope scaling gives: not supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_TERMS}


def _read_rope_factors(header: GGUFHeader, source: Path) -> tuple[float, ...]:
    info = header.tensor(ROPE_FACTORS)
    if info is None or info.type.name != "F32" or len(info.shape) != 1 or info.shape[0] > _MAX_ROPE_FACTORS:
        raise header.error(f"tensor {ROPE_FACTORS}", "must be a short vector of F32")
    with source.open("rb") as file:
        file.seek(info.offset_bytes)
        return struct.unpack(f"<{info.shape[0]}f", file.read(info.num_bytes))


def _llama3_factors(theta: float, factor: float, head_size: int) -> list[float]:
    """By what each rotary frequency is divided (Llama 3.1's `apply_scaling`)."""
    low, high = _LLAMA3_TERMS["low_freq_factor"], _LLAMA3_TERMS["high_freq_factor"]
    context = _LLAMA3_TERMS["original_max_position_embeddings"]
    factors = []
    for pair in range(0, head_size, 2):
        num_turns = context / (2 * math.pi * theta ** (pair / head_size))
        share_kept = min(1.0, max(0.0, (num_turns - low) / (high - low)))
        factors.append(1 / ((1 - share_kept) / factor + share_kept))
    return factors


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
