"""`EngineArgs` + the model folder + this machine → `EngineConfig`. The only place that settles an "auto"."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inferd.engine.config import (
    CacheConfig,
    Device,
    Dtype,
    EngineArgs,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from inferd.engine.errors import ConfigError, NotSupported
from inferd.engine.model_config import read_model_config


@dataclass(frozen=True)
class Hardware:
    """What "auto" looks at. Tests pass their own."""

    num_cpus: int
    has_cuda: bool
    fast_bfloat16: bool  # the processor multiplies bfloat16 natively


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
    device = _device(args, hardware, decisions)
    dtype = _dtype(args, model, device, hardware, decisions)
    max_model_len = _max_model_len(args, model, decisions)
    load_format = _load_format(args, model)
    return EngineConfig(
        model=model,
        cache=_cache(args, device, dtype),
        scheduler=_scheduler(args, device, max_model_len, decisions),
        parallel=ParallelConfig(args.tensor_parallel_size),
        device=device,
        dtype=dtype,
        load_format=load_format,
        attention_backend=args.attention_backend,
        kernels=args.kernels,
        num_threads=args.num_threads or hardware.num_cpus,
        seed=args.seed,
        executor="uniproc" if args.executor == "auto" else args.executor,
        decisions=tuple(decisions),
    )


def detect_hardware(device: str) -> Hardware:
    """Torch is asked about CUDA only when the answer can matter, since importing it takes a second."""
    has_cuda = device != "cpu" and _cuda_is_available()
    return Hardware(len(os.sched_getaffinity(0)), has_cuda, _cpu_has("avx512_bf16"))


def _cuda_is_available() -> bool:
    if not os.path.exists("/dev/nvidiactl"):
        return False
    import torch

    return torch.cuda.is_available()


def _cpu_has(flag: str) -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return any(line.startswith("flags") and flag in line.split() for line in file)
    except OSError:
        return False


def _check_ranges(args: EngineArgs) -> None:
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "num_threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0.0 < args.memory_fraction <= 1.0:
        raise ConfigError(f"memory_fraction must be above 0 and at most 1, got {args.memory_fraction}")
    if args.tensor_parallel_size != 1:
        raise NotSupported(f"tensor_parallel_size={args.tensor_parallel_size} is not supported yet, only 1")
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
    if device == "cuda":
        dtype: Dtype = "float16" if model.checkpoint_dtype == "float16" else "bfloat16"
        why = f"the checkpoint holds {model.checkpoint_dtype}"
    elif hardware.fast_bfloat16:
        dtype, why = "bfloat16", "this processor multiplies bfloat16 natively"
    else:
        dtype, why = "float32", "this processor has no bfloat16 instructions"
    decisions.append(f"dtype={dtype}: {why}")
    return dtype


def _max_model_len(args: EngineArgs, model: ModelConfig, decisions: list[str]) -> int:
    if args.max_model_len is None:
        decisions.append(f"max_model_len={model.max_position}: what the model was trained for")
        return model.max_position
    if args.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len={args.max_model_len} is beyond the {model.max_position} positions that the model knows"
        )
    return args.max_model_len


def _load_format(args: EngineArgs, model: ModelConfig) -> Literal["safetensors", "gguf", "dummy"]:
    if args.load_format != "auto":
        return args.load_format
    return "gguf" if any(model.path.glob("*.gguf")) else "safetensors"


def _cache(args: EngineArgs, device: Device, dtype: Dtype) -> CacheConfig:
    block_size = args.block_size or DEFAULTS[device].block_size
    hash_block_size = min(block_size, HASH_BLOCK_TOKENS)
    if block_size % hash_block_size:
        raise ConfigError(f"block_size={block_size} must be a multiple of {hash_block_size}")
    return CacheConfig(
        block_size=block_size,
        hash_block_size=hash_block_size,
        enable_prefix_caching=args.enable_prefix_caching,
        num_blocks=args.num_blocks,
        kv_cache_bytes=args.kv_cache_bytes,
        memory_fraction=args.memory_fraction,
        dtype=dtype,
    )


def _scheduler(args: EngineArgs, device: Device, max_model_len: int, decisions: list[str]) -> SchedulerConfig:
    defaults = DEFAULTS[device]

    def settle(name: str, given: int | None, default: Callable[[], int]) -> int:
        if given is not None:
            return given
        decisions.append(f"{name}={default()}: default on {device}")
        return default()

    max_num_seqs = settle("max_num_seqs", args.max_num_seqs, lambda: defaults.max_num_seqs)
    budget = settle("max_num_batched_tokens", args.max_num_batched_tokens, lambda: defaults.max_num_batched_tokens)
    return SchedulerConfig(max_num_seqs, budget, max_model_len, args.share_prefix_attention)
