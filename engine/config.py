"""What an engine runs with: written once by `resolve`, frozen afterwards. No torch.

What is learnt while running (blocks that fit, the longest context) is a separate value, never written back here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
KernelChoice = Literal["auto", "native", "torch"]


@dataclass(frozen=True)
class EngineArgs:
    """Every knob of a user, "auto" included. `resolve` turns it into an `EngineConfig`."""

    model: str  # a folder with config.json and weights
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    load_format: LoadFormat = "auto"
    max_model_len: int | None = None  # None: what the model was trained for
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    share_prefix_attention: bool = True
    num_blocks: int | None = None  # overrides what memory would allow
    kv_cache_bytes: int | None = None
    memory_fraction: float = 0.9  # of the device's memory, for all of this engine
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    kernels: KernelChoice = "auto"
    num_threads: int | None = None  # CPU threads of the engine
    seed: int = 0
    executor: Literal["auto", "uniproc", "scripted"] = "auto"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; `scaling` is "default", "linear" or "llama3" with its own fields."""

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's architecture in our own terms, from its config.json."""

    path: Path
    architecture: str  # "LlamaForCausalLM", …
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMS norm of each head of q and k
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    checkpoint_dtype: Dtype


@dataclass(frozen=True)
class CacheConfig:
    block_size: int  # tokens per page, a multiple of hash_block_size
    hash_block_size: int
    enable_prefix_caching: bool
    num_blocks: int | None
    kv_cache_bytes: int | None
    memory_fraction: float
    dtype: Dtype


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    share_prefix_attention: bool  # look for requests with equal first blocks


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class EngineConfig:
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: Device
    dtype: Dtype
    load_format: Literal["safetensors", "gguf", "dummy"]
    attention_backend: str
    kernels: KernelChoice
    num_threads: int
    seed: int
    executor: Literal["uniproc", "scripted"]
    decisions: tuple[str, ...] = field(default=(), compare=False)  # one sentence per "auto" that was settled
