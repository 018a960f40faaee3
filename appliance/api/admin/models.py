"""`/admin/v1/models`: every model as it stands, and what can be done to one.

Names may hold slashes, so what is done stands in front: `/admin/v1/models/NAME`, `/admin/v1/load/NAME`.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.errors import ApiError, bad_request
from inferd.appliance.api.state import AppState, state_of
from inferd.appliance.boards.fit import FitAnswer, fit
from inferd.appliance.chat.reasoning import format as reasoning_formats
from inferd.appliance.chat.tools import registry as tool_formats
from inferd.appliance.keepalive import parse_keep_alive
from inferd.appliance.library.options import ModelOptions
from inferd.appliance.library.records import ModelRecord
from inferd.engine.params import SamplingParams

router = APIRouter()
MODELS_PATH = "/admin/v1/models"


@router.get(MODELS_PATH)
async def list_models(request: Request) -> Response:
    state = state_of(request)
    return _json([state.models.status(record) for record in state.catalog.list_models()])


@router.get(MODELS_PATH + "/{name:path}")
async def show_model(request: Request, name: str) -> Response:
    return _status(state_of(request), state_of(request).catalog.find(name))


@router.post("/admin/v1/load/{name:path}")
@router.post("/admin/v1/wake/{name:path}")
async def load_model(request: Request, name: str) -> Response:
    """Answers when the model does. 503 with the reason when it does not come."""
    state = state_of(request)
    record = state.catalog.find(name)
    await state.supervisor.ensure_ready(record.id)
    state.audited(request, "model.load", record.id)
    return _status(state, record)


@router.post("/admin/v1/unload/{name:path}")
async def unload_model(request: Request, name: str) -> Response:
    """Answers when the model is gone: requests inside may finish, new ones would load it again."""
    state = state_of(request)
    record = state.catalog.find(name)
    await state.supervisor.unload(record.id, "an administrator asked for it")
    state.audited(request, "model.unload", record.id)
    return _status(state, record)


@router.post("/admin/v1/sleep/{name:path}")
async def sleep_model(request: Request, name: str, level: int = 1) -> Response:
    if level not in (1, 2):
        raise bad_request(f"level is 1 or 2, not {level}.", param="level")
    state = state_of(request)
    record = state.catalog.find(name)
    await state.supervisor.sleep(record.id, level, "an administrator asked for it")
    state.audited(request, "model.sleep", record.id, detail=f"level {level}")
    return _status(state, record)


@router.get("/admin/v1/blocks/{name:path}")
async def show_blocks(request: Request, name: str) -> Response:
    """Who has each block of the KV cache, as runs of blocks that are alike; requests under their names here."""
    state = state_of(request)
    slot = state.supervisor.slot(state.catalog.find(name).id)
    if slot is None or slot.engine is None:
        raise ApiError(409, f"The model {name[:200]} is not loaded.", code="not_loaded", param="name")
    block_map = await slot.engine.llm.insight.block_map()
    ours = {part: live.id for live in state.requests.live for part in live.parts}
    runs = [
        msgspec.structs.replace(run, request_id=ours.get(run.request_id or "", run.request_id))
        for run in block_map.runs
    ]
    return _json(
        {"at": block_map.at, "num_blocks": block_map.num_blocks, "runs": [msgspec.structs.asdict(run) for run in runs]}
    )


@router.get("/admin/v1/options/{name:path}")
async def show_options(request: Request, name: str) -> Response:
    state = state_of(request)
    return _json(state.options.find(state.catalog.find(name).id))


@router.patch("/admin/v1/options/{name:path}")
async def change_options(request: Request, name: str) -> Response:
    """The fields that the body names; null sets one back."""
    state = state_of(request)
    record = state.catalog.find(name)
    changes = await state.read_json(request)
    options = _changed(state.options.find(record.id), changes)
    state.options.put(record.id, options)
    state.planner.forget(record.id)
    state.supervisor.look_again()
    state.ticker.changed()
    state.audited(request, "model.options", record.id, detail=f"changed {', '.join(sorted(changes))}")
    return _json(options)


@router.get("/admin/v1/fit/{name:path}")
async def fit_model(request: Request, name: str, context: int | None = None) -> Response:
    """Whether it would fit now, who would have to go for it, and the longest context that fits."""
    state = state_of(request)
    return _json(await _fit(state, state.catalog.find(name), context))


async def _fit(state: AppState, record: ModelRecord, context: int | None) -> FitAnswer:
    if context is not None and context < 1:
        raise bad_request(f"context is a number of tokens, not {context}.", param="context")
    return fit(state.supervisor, state.planner, record.id, context)


def _changed(options: ModelOptions, changes: dict[str, object]) -> ModelOptions:
    """Raises a 400 `ApiError` that names the field."""
    fields = set(ModelOptions.__struct_fields__)
    if unknown := sorted(set(changes) - fields):
        raise bad_request(f"There is no option {unknown[0][:40]!r}. Options: {', '.join(sorted(fields))}.")
    plain = msgspec.to_builtins(ModelOptions())
    defaults = {name: getattr(ModelOptions(), name) for name in fields} | plain
    values = msgspec.to_builtins(options) | {
        name: defaults[name] if value is None else value for name, value in changes.items()
    }
    try:
        changed = msgspec.convert(values, ModelOptions)
        if changed.keep_alive is not None:
            parse_keep_alive(changed.keep_alive)
        SamplingParams(**changed.sampling)
        tool_formats.format_of(None, changed.tool_parser or tool_formats.AUTO)
        reasoning_formats.format_of(None, (), changed.reasoning_parser or reasoning_formats.AUTO)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise bad_request(f"The options are not valid: {error}.") from None
    return changed


def _status(state: AppState, record: ModelRecord) -> Response:
    return _json(state.models.status(record))


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
