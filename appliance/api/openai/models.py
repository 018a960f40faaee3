"""GET /v1/models: what can be asked for."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.openai.schemas import ModelCard, ModelList
from inferd.appliance.api.state import AppState, state_of
from inferd.appliance.library.records import ModelRecord

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    state = state_of(request)
    records = sorted(state.catalog.list_models(), key=lambda record: state.supervisor.slot(record.id) is None)
    cards = [_card(state, record, record.id) for record in records]  # loaded ones first: some clients take the first
    return Response(msgspec.json.encode(ModelList(cards)), media_type="application/json")


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> Response:
    state = state_of(request)
    card = _card(state, state.catalog.find(name), name)
    return Response(msgspec.json.encode(card), media_type="application/json")


def _card(state: AppState, record: ModelRecord, name: str) -> ModelCard:
    slot = state.supervisor.slot(record.id)
    served = slot.engine if slot is not None else None
    limit = served.max_model_len if served is not None else record.context_limit
    return ModelCard(id=name, created=record.created_at, max_model_len=limit, root=record.id)
