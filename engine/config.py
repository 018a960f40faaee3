"""What an engine runs with: written once by `resolve`, frozen afterwards. No torch.

What is learnt while running (blocks that fit, the longest context) is a separate value, never written back here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from inferd.engine.pooling.config import EncoderConfig, PoolerConfig

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
KernelChoice = Literal["auto", "native", "torch"]
SchedulingPolicy = Literal["fair", "fcfs", "priority"]
SpeculativeMethod = Literal["ngram", "draft"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]


class CUDAGraphMode(StrEnum):
    """Which steps are captured as CUDA graphs and replayed."""

    NONE = "NONE"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"  # those with one token a row
    FULL = "FULL"  # all of them, as far as the attention backend can be captured


@dataclass(frozen=True)
class SpeculativeArgs:
    """How next tokens are guessed, which the model then checks all at once: by what followed on the last tokens where
    they stood before ("ngram"), or by a smaller model over the same vocabulary ("draft")."""

    method: SpeculativeMethod
    num_speculative_tokens: int = 5  # guesses of a step for one request, at most
    prompt_lookup_min: int = 3  # tokens that must have stood there before, "ngram" only
    prompt_lookup_max: int = 5  # the place where most of these stood is taken
    model: str | None = None  # the smaller model's folder


@dataclass(frozen=True)
class EngineArgs:
    """Every knob of a user, "auto" included. `resolve` turns it into an `EngineConfig`."""

    model: str  # a folder with config.json and weights
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    load_format: LoadFormat = "auto"
    runner: str = "auto"  # "generate" tokens, or "pooling": vectors and scores; "auto": what the model is made for
    pooling: str = "auto"  # of hidden states: "mean", "cls" or "last", where the model should not decide
    max_model_len: int | Literal["auto"] | None = None  # None: what the model was trained for; "auto": what fits of it
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: SchedulingPolicy = "fair"  # between lanes and clients; among one client's requests by arrival
    long_prefill_token_threshold: int = 0  # the most that a step computes of one request; 0: all that its budget allows
    async_scheduling: bool | None = None  # schedule a step while the one before it runs; None: no
    block_size: int | None = None
    enable_prefix_caching: bool = True
    share_prefix_attention: bool = True
    num_blocks: int | None = None  # overrides what memory would allow
    kv_cache_bytes: int | None = None  # of each rank
    enable_kv_events: bool = False  # tell in `EngineOutputs.kv_events` which blocks can be found, and which no longer
    memory_fraction: float = 0.9  # of the device's memory, for all of this engine
    tensor_parallel_size: int = 1  # ranks that each layer is divided over, one worker process each
    step_timeout_s: float = 300.0  # workers that need longer for a step count as hung
    attention_backend: str = "auto"
    kernels: KernelChoice = "auto"
    cudagraph_mode: str = "auto"  # or the name of a `CUDAGraphMode`
    num_threads: int | None = None  # CPU threads of the engine, divided over its ranks
    seed: int | None = None  # of requests without one of their own; None: drawn at each start
    grammar_backend: str = "auto"  # or one of `grammar.backends`
    enable_lora: bool = False  # adapters can be loaded, and requests may name one
    max_loras: int = 1  # adapters that requests run with at the same time
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None  # adapters kept in main memory, the others are read again; None: `max_loras`
    speculative: SpeculativeArgs | None = None  # guess tokens ahead
    executor: Literal["auto", "uniproc", "multiproc", "scripted"] = "auto"


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
    windowed_layers: tuple[int, ...] | None = None  # which layers have `sliding_window`; None: all, if there is one
    windowed_rope: RopeConfig | None = None  # of layers with a window, where it is another than `rope`
    attention_scale: float | None = None  # None: 1 / sqrt(head_size)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    activation: Activation = "silu"
    encoder: EncoderConfig | None = None  # of a model whose tokens see all others
    pooler: PoolerConfig | None = None  # of a model that is made to give vectors or scores instead of tokens

    def window_of(self, layer: int) -> int | None:
        """A query of that layer at position p sees the keys at (p - window, p]; None: all before it."""
        if self.windowed_layers is not None and layer not in self.windowed_layers:
            return None
        return self.sliding_window

    def rope_of(self, layer: int) -> RopeConfig:
        has_own = self.windowed_rope is not None and self.window_of(layer) is not None
        return self.windowed_rope if has_own and self.windowed_rope is not None else self.rope


@dataclass(frozen=True)
class CacheConfig:
    block_size: int  # tokens per page, a multiple of hash_block_size
    hash_block_size: int
    enable_prefix_caching: bool
    num_blocks: int | None
    kv_cache_bytes: int | None
    memory_fraction: float
    dtype: Dtype
    enable_kv_events: bool = False


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    share_prefix_attention: bool  # look for requests with equal first blocks
    policy: SchedulingPolicy = "fair"
    long_prefill_token_threshold: int = 0  # 0: none
    async_scheduling: bool = False
    fit_max_model_len: bool = False  # the longest context is what memory allows, `max_model_len` at most
    enable_chunked_prefill: bool = True  # else a step computes all of a prompt or nothing of it
    num_speculative_tokens: int = 0  # drafts that a step may check of one request
    num_lookahead_tokens: int = 0  # slots behind a step's tokens that making drafts may need

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be on their way at once: one that runs, and one that waits for it."""
        return 2 if self.async_scheduling else 1

    @property
    def max_uncomputed_tokens(self) -> int:
        """The most tokens of one request that all steps on their way compute, and slots that they use ahead."""
        threshold = self.long_prefill_token_threshold or self.max_num_batched_tokens
        largest = min(self.max_num_batched_tokens, max(threshold, 1 + self.num_speculative_tokens))
        return self.max_concurrent_batches * largest + self.num_lookahead_tokens


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    step_timeout_s: float = 300.0


@dataclass(frozen=True)
class GrammarConfig:
    backends: tuple[str, ...] = ()  # in the order in which they are asked; see `grammar.backends`
    compile_timeout_s: float = 5.0
    cache_bytes: int = 256 << 20  # of compiled grammars that no running request holds


@dataclass(frozen=True)
class LoRAConfig:
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int  # `max_loras` at least


@dataclass(frozen=True)
class SpeculativeConfig:
    method: SpeculativeMethod
    num_tokens: int  # of a draft, at most
    prompt_lookup_min: int
    prompt_lookup_max: int
    num_fixed_rows: int  # a step costs as much without any row as so many rows do
    model: ModelConfig | None = None  # the draft model
    load_format: Literal["safetensors", "gguf", "dummy"] = "safetensors"  # of the draft model

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots behind the known tokens that making a draft may store keys and values in."""
        return self.num_tokens if self.model is not None else 0


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
    num_threads: int  # CPU threads of each worker
    seed: int  # of requests without one of their own
    executor: Literal["uniproc", "multiproc", "scripted"]
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE
    grammar: GrammarConfig = GrammarConfig()
    lora: LoRAConfig | None = None  # None: no request has an adapter
    speculative: SpeculativeConfig | None = None  # None: nothing is guessed
    pooler: PoolerConfig | None = None  # this engine pools; None: it generates
    weights_seed: int = 0  # of the dummy loader's
    decisions: tuple[str, ...] = field(default=(), compare=False)  # one sentence per "auto" that was settled
