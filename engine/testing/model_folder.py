"""A complete tiny model folder, so that whole-process tests need neither a download nor torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from inferd.engine.frontend.detokenize import BYTE_VALUES

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
IM_START_ID = 256
IM_END_ID = 257
MODEL_VOCAB_SIZE = 272  # above the tokenizer's 258, as in many real checkpoints

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_model_folder(path: Path, *, config: dict[str, Any] | None = None, **scripted: Any) -> Path:
    """Writes a two-layer Llama's `config.json` and a tokenizer whose ids 0-255 are the bytes themselves.

    `config` overrides keys of `config.json`; `scripted` are the fields of `ScriptedOptions`. There are no weights: run
    it with `EngineArgs(executor="scripted")` or `load_format="dummy"`. Returns `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    _write(path / "config.json", _llama_config() | (config or {}))
    _write(path / "tokenizer_config.json", {"eos_token": IM_END, "chat_template": CHAT_TEMPLATE})
    _write(path / "generation_config.json", {"eos_token_id": IM_END_ID})
    if scripted:
        _write(path / "scripted.json", scripted)
    return path


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: one token a byte, plus the two ChatML tokens."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_VALUES, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(IM_START, special=True), AddedToken(IM_END, special=True)])
    return tokenizer


def _llama_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": MODEL_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": IM_END_ID,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
