"""`GET /metrics`, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.state import state_of

router = APIRouter()
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(state_of(request).metrics.text(), media_type=CONTENT_TYPE)
