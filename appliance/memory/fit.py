"""What a model will need before it is loaded: arithmetic over its config.json, no torch, no device.

An estimate is only the start: what the first load measures corrects the next one (`facts.ModelFacts.correct`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from inferd.engine.config import ModelConfig

MIB = 1 << 20
PROCESS_BYTES = 400 * MIB  # an engine process with its libraries, before it has a model
CUDA_PROCESS_BYTES = 600 * MIB  # of the device: context, kernels, captured steps
STEP_TOKENS = 2048  # the largest step that the workspace is reckoned for
KV_TOKENS = 65536  # what keys and values are kept for, if that is more than one context and fits the share
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device, all ranks together."""

    weights: int
    kv: int
    workspace: int
    full_token_bytes: int  # that each token of a context takes
    windowed_token_bytes: int  # that each of the last `window` tokens takes
    window: int
    context_limit: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace

    @property
    def fixed(self) -> int:
        return self.weights + self.workspace

    def kv_bytes(self, num_tokens: int) -> int:
        """Of one request of so many tokens."""
        windowed = min(num_tokens, self.window + STEP_TOKENS)
        return self.full_token_bytes * num_tokens + self.windowed_token_bytes * windowed

    def longest_context(self, room_bytes: int) -> int:
        """The most tokens of which one request fits beside the weights; 0 when none does."""
        room = room_bytes - self.fixed
        return bisect_right(range(1, self.context_limit + 1), room, key=self.kv_bytes)

    def scaled(self, ratio: float) -> Estimate:
        """With the fixed part corrected."""
        return replace(self, weights=int(self.weights * ratio), workspace=int(self.workspace * ratio))


def estimate(
    config: ModelConfig,
    *,
    device: str,
    dtype: str = "auto",
    context_limit: int | None = None,
    kv_bytes: int | None = None,
    kv_share_bytes: int,
) -> Estimate:
    """`kv_bytes`: as configured. Else room for several contexts, within `kv_share_bytes`, and for one at least."""
    width = BYTES_OF[_dtype(config, device, dtype)]
    limit = min(context_limit or config.max_position, config.max_position)
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    layer_bytes = 2 * config.num_kv_heads * config.head_size * width
    base = Estimate(
        weights=num_parameters(config) * width,
        kv=0,
        workspace=_workspace(config, width, device),
        full_token_bytes=layer_bytes * sum(window is None for window in windows),
        windowed_token_bytes=layer_bytes * sum(window is not None for window in windows),
        window=max((window for window in windows if window is not None), default=0),
        context_limit=limit,
    )
    if config.encoder is not None:  # nothing is kept between steps
        return replace(base, full_token_bytes=0, windowed_token_bytes=0)
    one = base.kv_bytes(limit)
    several = max(1, KV_TOKENS // limit) * one
    return replace(base, kv=kv_bytes if kv_bytes is not None else max(one, min(several, kv_share_bytes)))


def num_parameters(config: ModelConfig) -> int:
    """Of a decoder of the Llama kind; norms and biases are too small to count."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return config.num_layers * layer + embeddings


def _workspace(config: ModelConfig, width: int, device: str) -> int:
    step = STEP_TOKENS * (4 * config.hidden_size + 3 * config.intermediate_size) * width
    logits = 64 * config.vocab_size * 4 * 3
    return step + logits + (CUDA_PROCESS_BYTES if device == "cuda" else PROCESS_BYTES)


def _dtype(config: ModelConfig, device: str, dtype: str) -> str:
    if dtype != "auto":
        return dtype
    return "bfloat16" if device == "cpu" else config.checkpoint_dtype
