"""A request's JSON body: read within limits, parsed strictly.

Stricter than the `json` module: no NaN or infinity, no duplicate keys, no lone surrogates (they cannot be encoded
again), an object at the top. Every refusal is a 4xx `ApiError`.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from inferd.appliance.api.errors import ApiError, bad_request

LONG_DIGITS = re.compile(rb"[0-9]{19}")
PARSE_IN_THREAD_BYTES = 256 * 1024  # above this, parsing would hold up every stream


async def read_json(request: Request, *, limit_bytes: int, timeout_s: float) -> dict[str, Any]:
    raw = await _read(request, limit_bytes, timeout_s)
    if len(raw) > PARSE_IN_THREAD_BYTES:
        return await asyncio.to_thread(parse_json_object, raw)
    return parse_json_object(raw)


async def _read(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes > limit_bytes:
                    raise too_large(limit_bytes)
                pieces.append(piece)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {timeout_s:g} s.", type="timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "The client left before its body was complete.", headers={"connection": "close"}) from None
    return b"".join(pieces)


def too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {limit_bytes} bytes.",
        type="request_too_large",
        code="request_too_large",
    )


def parse_json_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_int64 if LONG_DIGITS.search(raw) else None,
        )
    except UnicodeDecodeError:
        raise bad_request("The body is not valid UTF-8.", code="invalid_json") from None
    except json.JSONDecodeError as error:
        text = f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        raise bad_request(text, code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    if b"\\ud" in raw or b"\\uD" in raw:
        _refuse_surrogates(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise bad_request(f"The key {_first_repeated(pairs)[:100]!r} stands twice in one object.", code="invalid_json")
    return value


def _first_repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    return name


def _refuse_constant(name: str) -> float:
    raise bad_request(f"{name} is not a JSON number; every number must be finite.")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise bad_request(f"{digits[:40]} is out of range; every number must be finite.")
    return value


def _int64(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else 2**64
    if not -(2**63) <= value < 2**63:
        raise bad_request(f"{digits[:40]} is out of range; a whole number has at most 64 bits.")
    return value


def _refuse_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request("The body holds half a surrogate pair: it is not valid Unicode text.") from None
