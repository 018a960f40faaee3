"""`DELETE /admin/v1/models/{name}`: takes a model out of the library and off the disk."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferd.appliance.api.errors import ApiError
from inferd.appliance.api.homes import refuse_other_home
from inferd.appliance.api.state import AppState, state_of
from inferd.appliance.client import MODELS_PATH
from inferd.appliance.library.errors import LibraryError, ModelInUse, ModelNotFound
from inferd.appliance.supervisor.states import ModelState

router = APIRouter()
GONE = frozenset({ModelState.ON_DISK, ModelState.FAILED})  # no process


@router.delete(MODELS_PATH + "/{name:path}")
async def remove(request: Request, name: str, home: str | None = None) -> Response:
    """`home`: the caller's, as for pulls. 409 for a model that is loaded or on its way into the library."""
    state = state_of(request)
    refuse_other_home(home, str(state.pulls.library.home))
    try:
        await _let_go(state, name)
        removed = await state.pulls.remove_async(name)
    except ModelNotFound as error:
        raise ApiError(404, f"{error}.", code=error.code, param="name") from None
    except ModelInUse as error:
        raise ApiError(409, f"{error}.", code=error.code) from None
    except LibraryError as error:
        raise ApiError(503 if error.retryable else 500, f"{error}.", type="server_error", code=error.code) from None
    state.ticker.changed()
    state.audited(request, "model.remove", removed.model)
    return Response(msgspec.json.encode(removed), media_type="application/json")


async def _let_go(state: AppState, name: str) -> None:
    """The supervisor forgets a model that it does not run. Raises `ModelInUse`."""
    model = state.pulls.library.id_of(name)
    slot = None if model is None else state.supervisor.slot(model)
    if slot is None:
        return
    if slot.state not in GONE or slot.door.num_waiting:
        raise ModelInUse(f"{slot.model} is in use ({slot.state.value}); `inferd unload {slot.model}` ends that")
    await state.supervisor.forget(slot.model)
