"""GGUF's architectures and tensor names → Hugging Face's. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from inferd.engine.errors import LoadError
from inferd.engine.loader.gguf_header import GGUFHeader

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")

ROPE_FACTORS = "rope_freqs.weight"  # a derived table: the importer turns it back into config.json's rope_scaling


@dataclass(frozen=True)
class GGUFArchitecture:
    """What a value of `general.architecture` means in Hugging Face's terms."""

    name: str
    hf_names: tuple[str, ...]  # values of config.json's `architectures` that read such weights
    permuted_qk: bool  # rows of q and k are interleaved for rotary pairs that are neighbours
    block: Mapping[str, str] = field(default_factory=lambda: _BLOCK)
    norm_offset: float = 0.0  # by how much the file's norm weights are larger than those of the original checkpoint


ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "gemma2": GGUFArchitecture("gemma2", ("Gemma2ForCausalLM",), permuted_qk=False, block=_GEMMA, norm_offset=1.0),
    "gemma3": GGUFArchitecture(
        "gemma3", ("Gemma3ForCausalLM",), permuted_qk=False, block=_GEMMA | _HEAD_NORMS, norm_offset=1.0
    ),
    "llama": GGUFArchitecture("llama", ("LlamaForCausalLM", "MistralForCausalLM"), permuted_qk=True),
    "qwen2": GGUFArchitecture("qwen2", ("Qwen2ForCausalLM",), permuted_qk=False),
    "qwen3": GGUFArchitecture("qwen3", ("Qwen3ForCausalLM",), permuted_qk=False, block=_BLOCK | _HEAD_NORMS),
}


def architecture_of(header: GGUFHeader) -> GGUFArchitecture:
    """Raises LoadError for a file that is not one whole model of a supported architecture."""
    name = header.text("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise header.error("architecture", f"{name[:40]!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if (num_parts := header.integer("split.count", 1)) > 1:
        raise header.error("split.count", f"one of {num_parts} parts is not supported; join them with gguf-split first")
    return architecture


def checkpoint_name(architecture: GGUFArchitecture, name: str, num_layers: int) -> str | None:
    """Hugging Face's name of a GGUF tensor, None for one that holds no weights.

    Raises LoadError for a tensor that the architecture does not have.
    """
    if name == ROPE_FACTORS:
        return None
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in architecture.block:
        raise LoadError(f"tensor {name[:80]!r} is not part of the architecture {architecture.name}")
    if int(match[1]) >= num_layers:
        raise LoadError(f"tensor {name!r} lies beyond the model's {num_layers} layers")
    return f"model.layers.{match[1]}.{architecture.block[match[2]]}.{match[3]}"
