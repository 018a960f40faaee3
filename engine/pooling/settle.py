"""Whether an engine pools, and what follows from it for its other options. Pure; part of `resolve`."""

from __future__ import annotations

from dataclasses import replace
from typing import cast, get_args

from inferd.engine.config import EngineArgs, ModelConfig
from inferd.engine.errors import ConfigError
from inferd.engine.pooling.architectures import split
from inferd.engine.pooling.config import PoolerConfig, PoolingType
from inferd.engine.pooling.folder import embedder

RUNNERS = ("auto", "generate", "pooling")
POOLING_TYPES = ("auto", *get_args(PoolingType))


def settle_pooler(args: EngineArgs, model: ModelConfig, decisions: list[str]) -> PoolerConfig | None:
    """None: it generates. Raises `ConfigError` naming the option that cannot hold."""
    for name, value, known in (("runner", args.runner, RUNNERS), ("pooling", args.pooling, POOLING_TYPES)):
        if value not in known:
            raise ConfigError(f"{name}={value} is not known; choose one of {', '.join(known)}")
    pooler = _wanted_pooler(args, model)
    if pooler is None:
        if args.pooling != "auto":
            raise ConfigError(f"pooling={args.pooling} is for vectors, and this engine generates; set runner=pooling")
        return None
    for name, is_on in (("enable_lora", args.enable_lora), ("speculative", args.speculative is not None)):
        if is_on:
            raise ConfigError(f"{name} is for models that generate, and this engine pools; leave it out")
    if args.pooling != "auto":
        if pooler.has_head:
            raise ConfigError(
                f"pooling={args.pooling}: the head of {model.architecture} was trained on {pooler.pooling}"
            )
        pooler = replace(pooler, pooling=cast(PoolingType, args.pooling))
    decisions.append(f"runner=pooling: {pooler.pooling} of the last hidden states, for {', '.join(pooler.tasks)}")
    return pooler


def _wanted_pooler(args: EngineArgs, model: ModelConfig) -> PoolerConfig | None:
    generates = model.encoder is None and split(model.architecture)[1] == "causal"
    if args.runner == "generate":
        if not generates:
            raise ConfigError(f"runner=generate: {model.architecture} generates no tokens; use runner=pooling or auto")
        return None
    if args.runner == "pooling" and model.pooler is None:
        return embedder("last")
    return model.pooler


def check_pooling_limits(args: EngineArgs, max_model_len: int) -> None:
    """What an engine cannot do whose model sees a whole text at once. Raises `ConfigError`."""
    budget = args.max_num_batched_tokens
    if budget is not None and budget < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is below max_model_len={max_model_len}, and this model needs each text "
            "whole in one step; raise the one or lower the other"
        )
    if args.long_prefill_token_threshold:
        raise ConfigError(
            f"long_prefill_token_threshold={args.long_prefill_token_threshold} cuts texts into chunks, and this model "
            "needs each of them whole in one step; leave it at 0"
        )


def reads_prefix_cache(pooler: PoolerConfig, model: ModelConfig) -> bool:
    """Only the last state of causal attention is the same when the states before it are not computed again."""
    return model.encoder is None and pooler.pooling == "last"
