"""POST /v1/embeddings: texts or token ids in, vectors out, as numbers or as base64."""

from __future__ import annotations

import base64

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.openai.pooling import blamed_on, check_count, pool
from inferd.appliance.api.openai.pooling_schemas import Embedding, EmbeddingAnswer, EmbeddingRequest
from inferd.appliance.api.openai.schemas import read_fields
from inferd.appliance.api.openai.unsupported import EMBEDDINGS, refuse_unsupported
from inferd.appliance.api.sse import Exchange, Wire
from inferd.appliance.api.state import state_of
from inferd.engine.errors import InvalidRequest
from inferd.engine.pooling.outputs import PoolingOutput
from inferd.engine.pooling.params import PoolingParams

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    state = state_of(request)
    body = await state.read_json(request)
    ask = read_fields(body, EmbeddingRequest)
    refuse_unsupported(body, EMBEDDINGS)
    return Exchange(lambda wire: _answer(request, ask, wire), state.settings.keepalive_s)


async def _answer(request: Request, ask: EmbeddingRequest, wire: Wire) -> None:
    prompts = split_inputs(ask.input)
    params = PoolingParams(
        task="embed",
        normalize=ask.normalize,
        dimensions=ask.dimensions,
        truncate_prompt_tokens=ask.truncate_prompt_tokens,
    )
    request_id = f"embd-{request.state.request_id}"
    async with state_of(request).serve(request, ask.model, "embeddings") as (served, live):
        with blamed_on("input"):
            pooled = await pool(served, live, prompts, params, request_id)
        data = [Embedding(index, _encoded(output, ask)) for index, output in enumerate(pooled.outputs)]
        await wire.json(msgspec.json.encode(EmbeddingAnswer(ask.model, data, pooled.usage)), pooled.headers)


def split_inputs(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One text or several, each as text or as token ids. Raises `InvalidRequest`."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if ids and len(ids) == len(given):
        return [ids]
    if ids:
        raise InvalidRequest("input mixes token ids with other items", param="input")
    check_count("input", len(given))
    return [item for item in given if not isinstance(item, int)]


def _encoded(output: PoolingOutput, ask: EmbeddingRequest) -> list[float] | str:
    if ask.encoding_format == "base64":
        return base64.b64encode(output.little_endian).decode()
    return output.values
