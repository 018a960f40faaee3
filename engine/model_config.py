"""A model folder's JSON files → `ModelConfig`. Reads data, never code, and no torch.

A folder that wants code of its own to run (`auto_map` and its kin, at any depth of any of its JSON files) is refused:
the model is data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from inferd.engine.config import Activation, Dtype, ModelConfig
from inferd.engine.errors import LoadError
from inferd.engine.model_attention import AttentionKind, read_ropes, read_windows
from inferd.engine.model_encoder import ENCODERS, read_encoder
from inferd.engine.model_fields import Fields
from inferd.engine.pooling.architectures import POOLED_DECODERS, split
from inferd.engine.pooling.config import PoolerConfig
from inferd.engine.pooling.folder import read_classifier, read_embedder

MAX_JSON_BYTES = 64 << 20
FORBIDDEN_KEYS = frozenset({"auto_map", "custom_code", "custom_pipelines", "trust_remote_code"})
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Gemma:
    """Where that family has other fields and other defaults."""

    attention_softcap: float | None = None
    logit_softcap: float | None = None
    head_size: int = 256
    attention_scalar: int = 256  # scores are divided by its square root


@dataclass(frozen=True)
class Architecture:
    """What an architecture fixes that its config.json leaves out."""

    qkv_bias: bool = False  # always on, whatever config.json says
    qk_norm: bool = False
    attention: AttentionKind = field(default_factory=AttentionKind)
    gemma: Gemma | None = None


ARCHITECTURES: Mapping[str, Architecture] = {
    "Gemma2ForCausalLM": Architecture(attention=AttentionKind("if given", full_every=2), gemma=Gemma(50.0, 30.0)),
    "Gemma3ForCausalLM": Architecture(
        qk_norm=True,
        attention=AttentionKind("if given", full_every=6, theta=1e6, windowed_theta=1e4),
        gemma=Gemma(),
    ),
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(attention=AttentionKind("if given")),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, attention=AttentionKind("if switched on")),
    "Qwen3ForCausalLM": Architecture(qk_norm=True, attention=AttentionKind("if switched on")),
}


def read_model_config(folder: Path) -> ModelConfig:
    """Raises `LoadError` naming the file and the field that is missing, wrong or unsupported."""
    config = read_json(folder / "config.json")
    for name in JSON_FILES:
        if (folder / name).exists():
            refuse_code(read_json(folder / name), folder / name)
    name, fields = _architecture(config, folder), Fields(config, folder / "config.json")
    if name in ENCODERS:
        eos_token_ids = _eos_token_ids(folder, fields)
        return read_encoder(fields, name, eos_token_ids=eos_token_ids, dtype=_dtype(fields, "float32"))
    return _build(folder, fields, name)


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file of the model folder, with a bound on its size."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise LoadError(f"{path} is larger than {MAX_JSON_BYTES} bytes, too large for a configuration file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise LoadError(f"{path.parent} is not a model folder: it has no {path.name}") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} must hold a JSON object")
    return value


def refuse_code(value: Any, path: Path) -> None:
    """Raises `LoadError` if any object below `value` asks for code from the model folder."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            for key in node:
                if key in FORBIDDEN_KEYS or str(key).endswith("_internal"):
                    raise LoadError(f'{path} asks for code of its own ("{key}"); a model is data here and is refused')
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _architecture(config: Mapping[str, Any], folder: Path) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise LoadError(f'{folder / "config.json"} names no architecture (field "architectures")')
    known = {*ARCHITECTURES, *POOLED_DECODERS, *ENCODERS}
    if names[0] not in known:
        raise LoadError(f"architecture {names[0]} is not supported; supported: {', '.join(sorted(known))}")
    name: str = names[0]
    return name


def _build(folder: Path, fields: Fields, name: str) -> ModelConfig:
    architecture = ARCHITECTURES[split(name)[0]]
    num_heads = fields.whole("num_attention_heads")
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    hidden_size = fields.whole("hidden_size")
    num_layers, gemma = fields.whole("num_hidden_layers"), architecture.gemma
    head_size = fields.whole("head_dim", gemma.head_size if gemma is not None else hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_heads} query heads are not a multiple of {num_kv_heads}")
    if head_size % 2:
        raise fields.error("head_dim", f"{head_size} is odd, rotary embedding needs pairs")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "attention to later tokens is not supported")
    window, windowed_layers = read_windows(fields, architecture.attention, num_layers)
    rope, windowed_rope = read_ropes(fields, architecture.attention)
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        path=folder,
        architecture=name,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=fields.whole("max_position_embeddings", 2048),
        tie_embeddings=fields.flag("tie_word_embeddings", gemma is not None),
        attention_bias=bias or architecture.qkv_bias,
        output_bias=bias and not architecture.qkv_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=architecture.qk_norm,
        sliding_window=window,
        eos_token_ids=_eos_token_ids(folder, fields),
        bos_token_id=fields.optional_whole("bos_token_id"),
        checkpoint_dtype=_dtype(fields),
        windowed_layers=windowed_layers,
        windowed_rope=windowed_rope,
        attention_scale=None
        if gemma is None
        else fields.number("query_pre_attn_scalar", gemma.attention_scalar) ** -0.5,
        attention_softcap=None
        if gemma is None
        else _softcap(fields, "attn_logit_softcapping", gemma.attention_softcap),
        logit_softcap=None if gemma is None else _softcap(fields, "final_logit_softcapping", gemma.logit_softcap),
        activation=_activation(fields, gemma),
        pooler=_pooler(fields, name),
    )


def _pooler(fields: Fields, name: str) -> PoolerConfig | None:
    kind = split(name)[1]
    return read_classifier(fields, "last") if kind == "classifier" else read_embedder(fields, kind)


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """`null` means none, unlike a field that is not there."""
    return None if fields.values.get(name, default) is None else fields.number(name, default)


def _activation(fields: Fields, gemma: Gemma | None) -> Activation:
    name, only = ("hidden_act", "silu") if gemma is None else ("hidden_activation", "gelu_pytorch_tanh")
    if (given := fields.values.get(name) or only) != only:
        raise fields.error(name, f'"{given}" is not supported, only "{only}"')
    return "silu" if gemma is None else "gelu_tanh"


def _eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """The generation config's list wins over config.json's: chat models end turns with more than one token.

    The tokenizer's own end of sequence comes last. Ids beyond the vocabulary are left out: no such token is sampled.
    """
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    if ids is None:
        ids = fields.values.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in listed):
        raise fields.error("eos_token_id", f"must be token ids, got {ids!r}")
    vocab_size = fields.whole("vocab_size")
    return tuple(dict.fromkeys(id_ for id_ in [*listed, *_tokenizer_eos_ids(folder)] if id_ < vocab_size))


class _AddedToken(msgspec.Struct):
    id: Annotated[int, msgspec.Meta(ge=0)]
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _tokenizer_eos_ids(folder: Path) -> list[int]:
    """The id of `eos_token`, which is among the added tokens, as all special ones are."""
    settings, path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not settings.exists() or not path.exists():
        return []
    token = read_json(settings).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    try:
        added = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    return [known.id for known in added if known.content == text]


def _dtype(fields: Fields, default: Dtype = "bfloat16") -> Dtype:
    name = fields.values.get("dtype") or fields.values.get("torch_dtype") or default
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise fields.error("dtype", f'"{name}" is not supported; supported: {", ".join(DTYPES)}')
