"""POST /v1/score and /v1/rerank: how well texts go together, by a cross-encoder or by the cosine of embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.openai.pooling import Pooled, blamed_on, check_count, pool
from inferd.appliance.api.openai.pooling_schemas import (
    PoolingRequest,
    RankedDocument,
    RerankAnswer,
    RerankRequest,
    Score,
    ScoreAnswer,
    ScoreRequest,
    TextDocument,
)
from inferd.appliance.api.openai.schemas import read_fields
from inferd.appliance.api.openai.unsupported import SCORES, refuse_unsupported
from inferd.appliance.api.sse import Exchange, Wire
from inferd.appliance.api.state import state_of
from inferd.appliance.requests.live import LiveRequest
from inferd.appliance.supervisor.served import ServedModel
from inferd.engine.errors import InvalidRequest
from inferd.engine.pooling.inputs import TextPair
from inferd.engine.pooling.offline import for_embedding, make_pairs
from inferd.engine.pooling.params import PoolingParams
from inferd.engine.pooling.vectors import cosine

router = APIRouter()


@router.post("/v1/score")
@router.post("/score")
async def create_scores(request: Request) -> Response:
    state = state_of(request)
    body = await state.read_json(request)
    ask = read_fields(body, ScoreRequest)
    refuse_unsupported(body, SCORES)
    return Exchange(lambda wire: _score(request, ask, wire), state.settings.keepalive_s)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def create_ranks(request: Request) -> Response:
    state = state_of(request)
    body = await state.read_json(request)
    ask = read_fields(body, RerankRequest)
    refuse_unsupported(body, SCORES)
    return Exchange(lambda wire: _rerank(request, ask, wire), state.settings.keepalive_s)


async def _score(request: Request, ask: ScoreRequest, wire: Wire) -> None:
    with blamed_on("text_1"):
        pairs = make_pairs(ask.text_1, ask.text_2)
    check_count("text_2", len(pairs))
    params = _params(ask, ask.activation)
    request_id = f"score-{request.state.request_id}"
    async with state_of(request).serve(request, ask.model, "score") as (served, live):
        with blamed_on("text_2"):
            scores, pooled = await score_pairs(served, live, pairs, params, request_id)
        data = [Score(index, score) for index, score in enumerate(scores)]
        answer = ScoreAnswer(request_id, int(time.time()), ask.model, data, pooled.usage)
        await wire.json(msgspec.json.encode(answer), pooled.headers)


async def _rerank(request: Request, ask: RerankRequest, wire: Wire) -> None:
    check_count("documents", len(ask.documents))
    if ask.top_n is not None and ask.top_n < 0:
        raise InvalidRequest(f"top_n must not be negative, got {ask.top_n}", param="top_n")
    documents = [given if isinstance(given, TextDocument) else TextDocument(given) for given in ask.documents]
    pairs = [TextPair(ask.query, document.text) for document in documents]
    params = _params(ask, ask.activation)
    request_id = f"rerank-{request.state.request_id}"
    async with state_of(request).serve(request, ask.model, "rerank") as (served, live):
        with blamed_on("documents"):
            scores, pooled = await score_pairs(served, live, pairs, params, request_id)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: ask.top_n or None]
        results = [RankedDocument(index, scores[index]) for index in order]
        if ask.return_documents is not False:
            for result in results:
                result.document = documents[result.index]
        answer = RerankAnswer(request_id, ask.model, results, pooled.usage)
        await wire.json(msgspec.json.encode(answer), pooled.headers)


async def score_pairs(
    served: ServedModel, live: LiveRequest, pairs: Sequence[TextPair], params: PoolingParams, request_id: str
) -> tuple[list[float], Pooled]:
    """The score of each pair, and what was computed for them. Of an embedder each text is computed once."""
    info = served.llm.ready.pooling
    if info is None or "score" in info.tasks or "embed" not in info.tasks:
        pooled = await pool(served, live, pairs, params, request_id)
        return [output.values[0] for output in pooled.outputs], pooled
    unique = list(dict.fromkeys(text for pair in pairs for text in (pair.first, pair.second)))
    pooled = await pool(served, live, unique, for_embedding(params), request_id)
    vectors = {text: output.pooled for text, output in zip(unique, pooled.outputs, strict=True)}
    return [cosine(vectors[pair.first], vectors[pair.second]) for pair in pairs], pooled


def _params(ask: PoolingRequest, activation: bool | None) -> PoolingParams:
    return PoolingParams(task="score", activation=activation, truncate_prompt_tokens=ask.truncate_prompt_tokens)
