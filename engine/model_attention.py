"""What a model's config.json says about attention: which layers have a window, and the angles that each rotates by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from inferd.engine.config import RopeConfig
from inferd.engine.model_fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
# Layers that keep something else than keys and values of single tokens, by config.json's name for them.
OTHER_KINDS = {
    "chunked_attention": "chunked local attention",
    "linear_attention": "recurrent state",
    "mamba": "recurrent state",
    "mamba2": "recurrent state",
    "conv": "recurrent state",
    "recurrent": "recurrent state",
    "compressed_sparse_attention": "compressed keys",
    "heavily_compressed_attention": "compressed keys",
}


@dataclass(frozen=True)
class AttentionKind:
    """What an architecture fixes."""

    window: Literal["never", "if given", "if switched on"] = "never"  # what `sliding_window` means
    full_every: int | None = None  # without `layer_types`: each so many layers, the last of them has no window
    theta: float = 10000.0  # base of the angles where nothing is given
    windowed_theta: float | None = None  # the same for layers with a window, where they have their own


def read_windows(fields: Fields, kind: AttentionKind, num_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """The window, and which layers have it (None: all). Raises `LoadError` for layers of a kind that is not
    supported, by its name."""
    types = fields.values.get("layer_types")
    if types is not None:
        _check_types(fields, types, num_layers)
    if kind.window == "never" or fields.values.get("sliding_window") is None:
        return None, None
    if kind.window == "if switched on" and not fields.flag("use_sliding_window", False):
        return None, None
    window = fields.whole("sliding_window")
    if types is not None:
        layers = tuple(index for index, name in enumerate(types) if name == SLIDING)
    elif kind.full_every is not None:
        every = fields.whole("sliding_window_pattern", kind.full_every)
        layers = tuple(index for index in range(num_layers) if (index + 1) % every)
    elif kind.window == "if switched on":
        layers = tuple(range(fields.optional_whole("max_window_layers") or 0, num_layers))
    else:
        return window, None
    return (window, None if len(layers) == num_layers else layers) if layers else (None, None)


def read_ropes(fields: Fields, kind: AttentionKind) -> tuple[RopeConfig, RopeConfig | None]:
    """The model's rotary embedding, and that of layers with a window where they have their own.

    In the older of two generations of config.json it is `rope_theta` + `rope_scaling` (and `rope_local_base_freq`), in
    the newer one both inside `rope_parameters`, by type of layer where there are several.
    """
    given = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise fields.error("rope_parameters", "must be an object")
    by_type = {name: given[name] or {} for name in (FULL, SLIDING) if name in given}
    theta = fields.number("rope_theta", kind.theta)
    if kind.windowed_theta is None:
        if by_type:
            raise fields.error("rope_parameters", "different ones by type of layer are not supported here")
        return _rope(fields, given, theta), None
    windowed_theta = fields.number("rope_local_base_freq", kind.windowed_theta)
    full = by_type.get(FULL, {} if by_type else given)
    return _rope(fields, full, theta), _rope(fields, by_type.get(SLIDING, {}), windowed_theta)


def _rope(fields: Fields, values: Mapping[str, Any], theta: float) -> RopeConfig:
    rope = Fields(values, fields.path)
    theta = rope.number("rope_theta", theta)
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


def _check_types(fields: Fields, types: Any, num_layers: int) -> None:
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error("layer_types", f"must name the type of each of {num_layers} layers")
    for name in types:
        if name not in (FULL, SLIDING):
            needs = f", which keep another kind of KV cache ({OTHER_KINDS[name]})" if name in OTHER_KINDS else ""
            raise fields.error(
                "layer_types", f'layers of type "{name}"{needs} are not supported; supported: {FULL}, {SLIDING}'
            )
