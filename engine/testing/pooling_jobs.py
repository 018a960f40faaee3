"""Texts as tokens through a whole engine that pools, and their vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inferd.engine.core.step import EngineCore
from inferd.engine.messages import AddRequest, FinishReason
from inferd.engine.params import SamplingParams
from inferd.engine.pooling.params import PoolingInput, PoolingParams
from inferd.engine.pooling.vectors import unpack


def add_text(
    core: EngineCore,
    request_id: str,
    tokens: Sequence[int],
    params: PoolingParams,
    token_types: Sequence[int] | None = None,
    *,
    priority: int = 0,
) -> None:
    pooling = PoolingInput(params, list(token_types) if token_types is not None else None)
    request = AddRequest(request_id, list(tokens), SamplingParams(max_tokens=1), 0.0, priority, pooling=pooling)
    core.add(request)


def pool_all(
    core: EngineCore,
    texts: Mapping[str, Sequence[int]],
    params: PoolingParams,
    token_types: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, list[float]]:
    """By id, the result of each text, and of those that were there already. Raises RuntimeError for one that ends
    otherwise, and when blocks are missing afterwards."""
    for request_id, tokens in texts.items():
        add_text(core, request_id, tokens, params, (token_types or {}).get(request_id))
    found: dict[str, list[float]] = {}
    while core.has_work:
        for output in core.step().outputs:
            if output.finish_reason is not FinishReason.STOP or output.pooled is None or output.request_id in found:
                raise RuntimeError(f"{output.request_id} ended so: {output}")
            found[output.request_id] = unpack(output.pooled)
    stats = core.stats()
    if stats.blocks_free != stats.blocks_total or not found.keys() >= texts.keys():
        raise RuntimeError(f"blocks or texts are missing: {stats}, {sorted(found)}")
    return found
