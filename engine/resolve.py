"""`EngineArgs` + the model folder + this machine → `EngineConfig`. The only place that settles an "auto"."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from inferd.engine.config import (
    CacheConfig,
    CUDAGraphMode,
    Device,
    Dtype,
    EngineArgs,
    EngineConfig,
    GrammarConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
)
from inferd.engine.errors import ConfigError, NotSupported
from inferd.engine.grammar.backends import choose_backends
from inferd.engine.lora.settle import settle_lora
from inferd.engine.model_config import read_model_config
from inferd.engine.pooling.config import PoolerConfig
from inferd.engine.pooling.settle import check_pooling_limits, reads_prefix_cache, settle_pooler
from inferd.engine.spec.settle import settle_speculative


@dataclass(frozen=True)
class Hardware:
    """What "auto" looks at. Tests pass their own."""

    num_cpus: int
    has_cuda: bool
    fast_bfloat16: bool  # the processor multiplies bfloat16 natively
    num_cards: int = 1  # where has_cuda


@dataclass(frozen=True)
class Defaults:
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


DEFAULTS: dict[Device, Defaults] = {
    "cpu": Defaults(block_size=16, max_num_seqs=64, max_num_batched_tokens=2048),
    "cuda": Defaults(block_size=128, max_num_seqs=256, max_num_batched_tokens=8192),
}
HASH_BLOCK_TOKENS = 16
ATTENTION_BACKENDS = ("auto", "TRITON_ATTN", "TORCH")


def resolve(args: EngineArgs, hardware: Hardware | None = None) -> EngineConfig:
    """Raises `ConfigError` naming the option that cannot hold, `LoadError` for the model folder."""
    hardware = hardware or detect_hardware(args.device)
    _check_ranges(args)
    model = read_model_config(Path(args.model))
    decisions: list[str] = []
    pooler = settle_pooler(args, model, decisions)
    device = _device(args, hardware, decisions)
    dtype = _dtype(args, model, device, hardware, decisions)
    max_model_len = _max_model_len(args, model, pooler, decisions)
    load_format = _load_format(args, model)
    speculative = settle_speculative(args, model, device, decisions)
    return EngineConfig(
        model=model,
        cache=_cache(args, device, dtype, caching=_prefix_caching(args, model, pooler, decisions)),
        scheduler=_scheduler(args, model, device, max_model_len, speculative, decisions),
        parallel=_parallel(args, model, device, hardware),
        device=device,
        dtype=dtype,
        load_format=load_format,
        attention_backend=args.attention_backend,
        kernels=args.kernels,
        num_threads=_num_threads(args, hardware, decisions),
        seed=_seed(args, decisions),
        weights_seed=args.seed or 0,
        executor=_executor(args, decisions),
        cudagraph_mode=_cudagraph_mode(args, device, pooler, decisions),
        grammar=GrammarConfig(choose_backends(args.grammar_backend)),
        lora=settle_lora(args, pools=pooler is not None, decisions=decisions),
        speculative=speculative,
        pooler=pooler,
        decisions=tuple(decisions),
    )


def detect_hardware(device: str) -> Hardware:
    """Torch is asked about CUDA only when the answer can matter, since importing it takes a second."""
    has_cuda = device != "cpu" and _cuda_is_available()
    num_cards = _count_cards() if has_cuda else 0
    return Hardware(len(os.sched_getaffinity(0)), has_cuda, _cpu_has("avx512_bf16"), num_cards)


def _cuda_is_available() -> bool:
    if not os.path.exists("/dev/nvidiactl"):
        return False
    import torch

    return torch.cuda.is_available()


def _count_cards() -> int:
    import torch

    return torch.cuda.device_count()


def _cpu_has(flag: str) -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return any(line.startswith("flags") and flag in line.split() for line in file)
    except OSError:
        return False


def _check_ranges(args: EngineArgs) -> None:
    whole = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "num_threads")
    for name in (*whole, "tensor_parallel_size"):
        value = getattr(args, name)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if args.long_prefill_token_threshold < 0:
        raise ConfigError(
            f"long_prefill_token_threshold must be 0 (none) or more, got {args.long_prefill_token_threshold}"
        )
    policies = get_args(SchedulingPolicy)
    if args.scheduling_policy not in policies:
        raise ConfigError(
            f"scheduling_policy={args.scheduling_policy} is not known; choose one of {', '.join(policies)}"
        )
    if not 0.0 < args.memory_fraction <= 1.0:
        raise ConfigError(f"memory_fraction must be above 0 and at most 1, got {args.memory_fraction}")
    if not args.step_timeout_s > 0.0:
        raise ConfigError(f"step_timeout_s must be above 0, got {args.step_timeout_s}")
    if args.attention_backend not in ATTENTION_BACKENDS:
        known = ", ".join(ATTENTION_BACKENDS)
        raise ConfigError(f"attention_backend={args.attention_backend} is not known; choose one of {known}")


def _device(args: EngineArgs, hardware: Hardware, decisions: list[str]) -> Device:
    if args.device == "cuda" and not hardware.has_cuda:
        raise ConfigError("device=cuda: torch sees no CUDA device; use device=cpu or check the driver")
    if args.device == "auto":
        device: Device = "cuda" if hardware.has_cuda else "cpu"
        why = "a CUDA device is here" if hardware.has_cuda else "no CUDA device is here"
        decisions.append(f"device={device}: {why}")
        return device
    return args.device


def _dtype(args: EngineArgs, model: ModelConfig, device: Device, hardware: Hardware, decisions: list[str]) -> Dtype:
    if args.dtype != "auto":
        return args.dtype
    if model.encoder is not None and model.checkpoint_dtype == "float32":
        decisions.append("dtype=float32: as the checkpoint, since vectors are compared with those of other programs")
        return "float32"
    if device == "cuda":
        dtype: Dtype = "float16" if model.checkpoint_dtype == "float16" else "bfloat16"
        why = f"the checkpoint holds {model.checkpoint_dtype}"
    elif hardware.fast_bfloat16:
        dtype, why = "bfloat16", "this processor multiplies bfloat16 natively"
    else:
        dtype, why = "float32", "this processor has no bfloat16 instructions"
    decisions.append(f"dtype={dtype}: {why}")
    return dtype


def _max_model_len(args: EngineArgs, model: ModelConfig, pooler: PoolerConfig | None, decisions: list[str]) -> int:
    """With "auto" a bound: the KV cache's plan has the last word."""
    longest = model.max_position
    if pooler is not None and pooler.max_tokens is not None:
        longest = min(longest, pooler.max_tokens)
    if args.max_model_len == "auto":
        return longest
    if args.max_model_len is None:
        decisions.append(f"max_model_len={longest}: what the model was trained for")
        return longest
    if args.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len={args.max_model_len} is beyond the {model.max_position} positions that the model knows"
        )
    return args.max_model_len


def _load_format(args: EngineArgs, model: ModelConfig) -> Literal["safetensors", "gguf", "dummy"]:
    if args.load_format != "auto":
        return args.load_format
    return "gguf" if any(model.path.glob("*.gguf")) else "safetensors"


def _cudagraph_mode(
    args: EngineArgs, device: Device, pooler: PoolerConfig | None, decisions: list[str]
) -> CUDAGraphMode:
    wanted = args.cudagraph_mode
    if pooler is not None:
        if wanted not in ("auto", CUDAGraphMode.NONE):
            raise ConfigError(
                f"cudagraph_mode={wanted} captures decode steps, and a pooling model has none; choose NONE"
            )
        return CUDAGraphMode.NONE
    if wanted == "auto":
        mode = CUDAGraphMode.FULL_DECODE_ONLY if device == "cuda" else CUDAGraphMode.NONE
        decisions.append(f"cudagraph_mode={mode}: default on {device}")
        return mode
    if wanted in ("PIECEWISE", "FULL_AND_PIECEWISE"):
        raise NotSupported(f"cudagraph_mode={wanted} is not supported; choose FULL_DECODE_ONLY, FULL or NONE")
    if wanted not in CUDAGraphMode.__members__:
        raise ConfigError(f"cudagraph_mode={wanted} is not known; choose one of auto, {', '.join(CUDAGraphMode)}")
    if wanted != CUDAGraphMode.NONE and device != "cuda":
        raise ConfigError(f"cudagraph_mode={wanted} needs a CUDA device, this engine runs on {device}; choose NONE")
    return CUDAGraphMode(wanted)


def _prefix_caching(args: EngineArgs, model: ModelConfig, pooler: PoolerConfig | None, decisions: list[str]) -> bool:
    if not args.enable_prefix_caching or pooler is None or reads_prefix_cache(pooler, model):
        return args.enable_prefix_caching
    decisions.append(f"enable_prefix_caching=False: {pooler.pooling} pooling needs what a cached prefix has no more")
    return False


def _cache(args: EngineArgs, device: Device, dtype: Dtype, *, caching: bool) -> CacheConfig:
    block_size = args.block_size or DEFAULTS[device].block_size
    hash_block_size = min(block_size, HASH_BLOCK_TOKENS)
    if block_size % hash_block_size:
        raise ConfigError(f"block_size={block_size} must be a multiple of {hash_block_size}")
    return CacheConfig(
        block_size=block_size,
        hash_block_size=hash_block_size,
        enable_prefix_caching=caching,
        num_blocks=args.num_blocks,
        kv_cache_bytes=args.kv_cache_bytes,
        memory_fraction=args.memory_fraction,
        dtype=dtype,
        enable_kv_events=args.enable_kv_events,
    )


def _scheduler(
    args: EngineArgs,
    model: ModelConfig,
    device: Device,
    max_model_len: int,
    speculative: SpeculativeConfig | None,
    decisions: list[str],
) -> SchedulerConfig:
    defaults, chunked = DEFAULTS[device], model.encoder is None
    least_budget = 1 if chunked else max_model_len
    if not chunked:
        check_pooling_limits(args, max_model_len)

    def settle(name: str, given: int | None, default: Callable[[], int]) -> int:
        if given is not None:
            return given
        decisions.append(f"{name}={default()}: default on {device}")
        return default()

    max_num_seqs = settle("max_num_seqs", args.max_num_seqs, lambda: defaults.max_num_seqs)
    usual_budget = max(defaults.max_num_batched_tokens, least_budget)
    budget = settle("max_num_batched_tokens", args.max_num_batched_tokens, lambda: usual_budget)
    return SchedulerConfig(
        max_num_seqs,
        budget,
        max_model_len,
        args.share_prefix_attention,
        policy=args.scheduling_policy,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        async_scheduling=_async_scheduling(args, device, decisions),
        fit_max_model_len=args.max_model_len == "auto",
        enable_chunked_prefill=chunked,
        num_speculative_tokens=speculative.num_tokens if speculative is not None else 0,
        num_lookahead_tokens=speculative.num_lookahead_tokens if speculative is not None else 0,
    )


def _async_scheduling(args: EngineArgs, device: Device, decisions: list[str]) -> bool:
    if args.async_scheduling is not None:
        return args.async_scheduling
    decisions.append(f"async_scheduling=False: default on {device}")
    return False


def _parallel(args: EngineArgs, model: ModelConfig, device: Device, hardware: Hardware) -> ParallelConfig:
    """Ranks have equal parts of every layer, so what they divide must be divisible."""
    size = args.tensor_parallel_size
    option = f"tensor_parallel_size={size}"
    if device == "cuda" and size > hardware.num_cards:
        raise ConfigError(f"{option} needs a card for each rank, this machine has {hardware.num_cards}; lower it")
    for name in ("num_heads", "intermediate_size"):
        total = getattr(model, name)
        if total % size:
            raise ConfigError(f"{option} does not divide this model's {name}={total}; choose a divisor")
    if model.num_kv_heads % size and size % model.num_kv_heads:
        raise ConfigError(
            f"{option} does not fit this model's num_kv_heads={model.num_kv_heads}: one must be a multiple of the other"
        )
    return ParallelConfig(size, args.step_timeout_s)


def _executor(args: EngineArgs, decisions: list[str]) -> Literal["uniproc", "multiproc", "scripted"]:
    size = args.tensor_parallel_size
    if args.executor == "auto":
        executor: Literal["uniproc", "multiproc"] = "uniproc" if size == 1 else "multiproc"
        decisions.append(f"executor={executor}: tensor_parallel_size={size}")
        return executor
    if args.executor != "multiproc" and size > 1:
        raise ConfigError(f"executor={args.executor} runs one rank, not {size}; use multiproc or auto")
    return args.executor


def _seed(args: EngineArgs, decisions: list[str]) -> int:
    """Drawn where none is given, so that two starts do not give the same "random" answers."""
    if args.seed is not None:
        return args.seed
    seed = secrets.randbits(63)
    decisions.append(f"seed={seed}: drawn at this start; give it to repeat what requests without a seed got")
    return seed


def _num_threads(args: EngineArgs, hardware: Hardware, decisions: list[str]) -> int:
    """Of each worker: the ranks of one machine share its processors."""
    total = args.num_threads or hardware.num_cpus
    if args.tensor_parallel_size == 1:
        return total
    share = max(1, total // args.tensor_parallel_size)
    decisions.append(f"num_threads={share} a worker: {total} over {args.tensor_parallel_size} ranks")
    return share
