"""What Gemma's config.json has beside the common fields. Where a GGUF file has no key for it, it is the same in all
released models of a size, and known by the number of layers (llama.cpp, `llama-model.cpp`)."""

from __future__ import annotations

from typing import Any

from inferd.engine.importer.metadata import Fields
from inferd.engine.loader.gguf_names import GGUFArchitecture

SERVED_KEYS = ("attn_logit_softcapping", "final_logit_softcapping")
_FULL_EVERY = {"gemma2": 2, "gemma3": 6}
_MODEL_TYPES = {"gemma2": "gemma2", "gemma3": "gemma3_text"}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # whose scores are scaled by the hidden size's share of a head
_WINDOWED_THETA = 10000.0


def gemma_json(fields: Fields, architecture: GGUFArchitecture) -> dict[str, Any]:
    """Raises LoadError naming the key that is missing or wrong."""
    name, num_layers = architecture.name, fields.integer("block_count")
    num_heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    is_27b = num_layers == _LAYERS_OF_27B[name]
    head_size = fields.integer("attention.key_length", 256)
    softcaps = {key: fields.number(key) if fields.has(key) else None for key in SERVED_KEYS}
    every = _FULL_EVERY[name]
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPES[name],
        "head_dim": head_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden_size // num_heads if is_27b else head_size,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (index + 1) % every else "full_attention" for index in range(num_layers)
        ],
        **softcaps,
    }
    if name == "gemma3":
        config["rope_local_base_freq"] = fields.number("rope.freq_base_swa", _WINDOWED_THETA)
    return config
