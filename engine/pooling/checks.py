"""What a request may ask of this engine: tokens of one that generates, vectors and scores of one that pools."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.config import EngineConfig
from inferd.engine.errors import InvalidRequest, NotSupported
from inferd.engine.messages import AddRequest, PoolingInfo
from inferd.engine.pooling.config import PoolingTask
from inferd.engine.pooling.params import PoolingParams

_WAYS: dict[str, str] = {
    "embed": "LLM.embed or /v1/embeddings",
    "classify": "LLM.classify",
    "score": "LLM.score, /v1/score or /v1/rerank",
    "reward": "LLM.reward",
}


def pooling_info(config: EngineConfig) -> PoolingInfo | None:
    """What the front is told of an engine that pools."""
    pooler = config.pooler
    if pooler is None:
        return None
    sizes, encoder = pooler.matryoshka_sizes, config.model.encoder
    return PoolingInfo(
        tasks=list(pooler.tasks),
        size=len(pooler.labels) or config.model.hidden_size,
        labels=list(pooler.labels),
        num_token_types=encoder.num_token_types if encoder is not None else 1,
        lower_case=pooler.lower_case,
        matryoshka_sizes=None if sizes is None else list(sizes),
    )


def refuse_generation(tasks: Sequence[PoolingTask]) -> None:
    """Raises `NotSupported` where an engine has tasks of pooling."""
    if tasks:
        ways = "; ".join(_WAYS[task] for task in tasks)
        raise NotSupported(f"this model generates no tokens, it is for {', '.join(tasks)}: use {ways}", param="model")


def check_task(params: PoolingParams, info: PoolingInfo | None) -> None:
    """Raises `NotSupported` for a task, or an embedding's size, that the model does not have."""
    if info is None:
        raise NotSupported(
            f"this model generates tokens and does not {params.task}; load it with runner=pooling, or choose another",
            param="model",
        )
    if params.task not in info.tasks:
        raise NotSupported(f"this model does not {params.task}; it is for {', '.join(info.tasks)}", param="model")
    if params.dimensions is None:
        return
    if params.dimensions > info.size:
        raise InvalidRequest(
            f"dimensions={params.dimensions} is above the {info.size} that this model has", param="dimensions"
        )
    if info.matryoshka_sizes and params.dimensions not in info.matryoshka_sizes:
        sizes = ", ".join(map(str, info.matryoshka_sizes))
        raise InvalidRequest(
            f"dimensions={params.dimensions} is none of those that this model was trained for: {sizes}",
            param="dimensions",
        )


def check_pooling(add: AddRequest, config: EngineConfig) -> None:
    """The engine's own look at a request that came over a socket. Raises `InvalidRequest`."""
    if add.pooling is None:
        refuse_generation(config.pooler.tasks if config.pooler is not None else ())
        return
    info = pooling_info(config)
    check_task(add.pooling.params, info)
    types = add.pooling.token_types
    if types is None or info is None:
        return
    if len(types) != len(add.prompt_token_ids):
        raise InvalidRequest(
            f"{len(types)} token types for {len(add.prompt_token_ids)} tokens; each has one", param="prompt"
        )
    if not 0 <= min(types) <= max(types) < info.num_token_types:
        raise InvalidRequest(f"a token type is between 0 and {info.num_token_types - 1} here", param="prompt")
