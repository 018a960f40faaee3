"""A model folder's JSON files → `ModelConfig`. Reads data, never code, and no torch.

A folder that wants code of its own to run (`auto_map` and its kin, at any depth of any of its JSON files) is refused:
the model is data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from inferd.engine.config import Dtype, ModelConfig, RopeConfig
from inferd.engine.errors import LoadError

MAX_JSON_BYTES = 64 << 20
FORBIDDEN_KEYS = frozenset({"auto_map", "custom_code", "custom_pipelines", "trust_remote_code"})
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Architecture:
    """What an architecture fixes that its config.json leaves out."""

    qkv_bias: bool = False  # always on, whatever config.json says
    qk_norm: bool = False
    window: Literal["never", "if given", "if switched on"] = "never"  # what `sliding_window` means


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(window="if given"),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, window="if switched on"),
    "Qwen3ForCausalLM": Architecture(qk_norm=True, window="if switched on"),
}


def read_model_config(folder: Path) -> ModelConfig:
    """Raises `LoadError` naming the file and the field that is missing, wrong or unsupported."""
    config = read_json(folder / "config.json")
    for name in JSON_FILES:
        if (folder / name).exists():
            refuse_code(read_json(folder / name), folder / name)
    name, architecture = _architecture(config, folder)
    return _build(folder, config, name, architecture)


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


def _architecture(config: Mapping[str, Any], folder: Path) -> tuple[str, Architecture]:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise LoadError(f'{folder / "config.json"} names no architecture (field "architectures")')
    if names[0] not in ARCHITECTURES:
        raise LoadError(f"architecture {names[0]} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")
    return names[0], ARCHITECTURES[names[0]]


def _build(folder: Path, config: Mapping[str, Any], name: str, architecture: Architecture) -> ModelConfig:
    fields = _Fields(config, folder / "config.json")
    num_heads = fields.whole("num_attention_heads")
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    hidden_size = fields.whole("hidden_size")
    head_size = fields.whole("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_heads} query heads are not a multiple of {num_kv_heads}")
    if head_size % 2:
        raise fields.error("head_dim", f"{head_size} is odd, rotary embedding needs pairs")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f'"{config["hidden_act"]}" is not supported, only "silu"')
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        path=folder,
        architecture=name,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        max_position=fields.whole("max_position_embeddings", 2048),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=bias or architecture.qkv_bias,
        output_bias=bias and not architecture.qkv_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=architecture.qk_norm,
        sliding_window=_window(fields, architecture),
        eos_token_ids=_eos_token_ids(folder, fields),
        bos_token_id=fields.optional_whole("bos_token_id"),
        checkpoint_dtype=_dtype(fields),
    )


def _rope(fields: _Fields) -> RopeConfig:
    """Either the older `rope_theta` + `rope_scaling`, or both inside `rope_parameters`."""
    values = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(values, dict):
        raise fields.error("rope_parameters", "must be an object")
    rope = _Fields(values, fields.path)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default")) or "default"
    if kind not in ("default", "linear", "llama3"):
        raise fields.error(
            "rope_parameters", f'rope type "{kind}" is not supported; supported: default, linear, llama3'
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=factor)
    return RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.whole("original_max_position_embeddings"),
    )


def _window(fields: _Fields, architecture: Architecture) -> int | None:
    """The window of every layer. Raises `LoadError` where some layers have one and others not."""
    if architecture.window == "never" or fields.values.get("sliding_window") is None:
        return None
    if architecture.window == "if switched on" and not fields.flag("use_sliding_window", False):
        return None
    layer_types = fields.values.get("layer_types")
    full_layers = fields.optional_whole("max_window_layers") if architecture.window == "if switched on" else None
    if (isinstance(layer_types, list) and len(set(layer_types)) > 1) or full_layers:
        raise fields.error("sliding_window", "layers with and without a window in one model are not supported")
    return fields.whole("sliding_window")


def _eos_token_ids(folder: Path, fields: _Fields) -> tuple[int, ...]:
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


def _dtype(fields: _Fields) -> Dtype:
    name = fields.values.get("dtype") or fields.values.get("torch_dtype") or "bfloat16"
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise fields.error("dtype", f'"{name}" is not supported; supported: {", ".join(DTYPES)}')


class _Fields:
    """Typed reads of one JSON object; errors name file and field."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def error(self, name: str, problem: str) -> LoadError:
        return LoadError(f'{self.path}, field "{name}": {problem}')

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.error(name, f"must be a positive whole number, got {value!r}")
        return value

    def optional_whole(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.error(name, f"must be a whole number, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.error(name, f"must be a positive number, got {value!r}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value
