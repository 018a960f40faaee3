"""What a client is told when something goes wrong: one shape, one table, no text of an unexpected exception."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from inferd.appliance.auth.admission import TooMany
from inferd.appliance.requests.errors import RequestCancelled
from inferd.appliance.supervisor.errors import ModelUnavailable, UnknownModel
from inferd.engine.errors import EngineDeadError, EngineError, InvalidRequest

MAX_MESSAGE_CHARS = 2000
INTERNAL = "The server failed to answer this request. Its log has the cause under the request id of this answer."
REQUEST_FAILED = "The engine could not finish this request; other requests go on. The log has the cause."
ENGINE_DEAD = "The engine process of this model ended while it worked on this request. It is being started again."


class ApiError(Exception):
    """An answer that is an error. `type` and `code` are what OpenAI's clients look at."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + " …"
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def server_error(status: int, message: str, code: str, retry_after_s: float | None = None) -> ApiError:
    headers = {} if retry_after_s is None else {"retry-after": str(math.ceil(retry_after_s))}
    return ApiError(status, message, type="server_error", code=code, headers=headers)


def to_api_error(error: Exception) -> ApiError:
    """Total: what is not known here becomes a 500 with a fixed text, and the caller logs it."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return bad_request(str(error), param=error.param, code=error.code)
        case UnknownModel():
            return ApiError(404, str(error), code="model_not_found", param="model")
        case ModelUnavailable():
            return server_error(503, f"{error}.", error.code, error.retry_after_s)
        case TooMany():
            headers = {"retry-after": str(math.ceil(error.retry_after_s))}
            return ApiError(429, f"{error}.", type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        case RequestCancelled():
            headers = {"x-should-retry": "false"}
            return ApiError(503, f"{error}.", type="server_error", code="request_cancelled", headers=headers)
        case EngineDeadError():
            return server_error(503, ENGINE_DEAD, error.code, retry_after_s=1)
    if is_expected(error):
        return server_error(500, REQUEST_FAILED, "request_failed")
    return server_error(500, INTERNAL, "internal_error")


def is_expected(error: Exception) -> bool:
    """False for what only a bug of ours can cause: it is logged with its traceback."""
    return isinstance(error, ApiError | EngineError | UnknownModel | ModelUnavailable | RequestCancelled | TooMany)
