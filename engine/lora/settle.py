"""The LoRA part of `EngineArgs` → `LoRAConfig`."""

from __future__ import annotations

from inferd.engine.config import EngineArgs, LoRAConfig
from inferd.engine.errors import ConfigError, NotSupported

MAX_RANK = 512  # above, an adapter is hardly smaller than the matrices that it adapts


def settle_lora(args: EngineArgs, *, pools: bool, decisions: list[str]) -> LoRAConfig | None:
    """`pools`: the engine gives vectors. Raises ConfigError naming the option, NotSupported for adapters there."""
    if not args.enable_lora:
        return None
    if pools:
        raise NotSupported("enable_lora is not supported for models that pool; leave it out", param="enable_lora")
    for name, most in (("max_loras", None), ("max_lora_rank", MAX_RANK)):
        value = getattr(args, name)
        if value < 1 or (most is not None and value > most):
            limit = "" if most is None else f" and at most {most}"
            raise ConfigError(f"{name} must be at least 1{limit}, got {value}")
    kept = args.max_loras if args.max_cpu_loras is None else args.max_cpu_loras
    if kept < args.max_loras:
        raise ConfigError(f"max_cpu_loras={kept} is below max_loras={args.max_loras}: what runs is kept; raise it")
    decisions.append(
        f"lora: {args.max_loras} adapters of rank {args.max_lora_rank} at most run at the same time, "
        f"{kept} are kept in main memory"
    )
    return LoRAConfig(args.max_loras, args.max_lora_rank, kept)
