"""What a caller may ask of one generation."""

from __future__ import annotations

import enum
import math
from typing import Any, cast

import msgspec

from inferd.engine.errors import InvalidRequest, check_unicode

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by it would overflow float32
MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 256


class OutputKind(enum.Enum):
    CUMULATIVE = "cumulative"  # every output holds the whole text so far
    DELTA = "delta"  # every output holds what is new
    FINAL_ONLY = "final_only"  # one output, at the end


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling and stopping of one request; valid once constructed.

    Raises `InvalidRequest` from the constructor (a `msgspec.ValidationError` when decoded), naming the field.
    `max_tokens=None` means all the room the context leaves.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all tokens
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        stop = cast(object, self.stop)
        if isinstance(stop, str):  # what callers write for one stop string
            self.stop = [stop]
        if self.top_k == -1:
            self.top_k = 0
        self._check_numbers()
        self._check_stops()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def _check_numbers(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0 and at most 1, got 0", param="top_p")
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**53)
        _whole("min_tokens", self.min_tokens, 0, 2**53)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", param="min_tokens"
            )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest("a stop string must be a non-empty string", param="stop")
            check_unicode("stop", text)
            if len(text.encode()) > MAX_STOP_BYTES:
                raise InvalidRequest(f"a stop string has at most {MAX_STOP_BYTES} bytes", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"at most {MAX_STOP_TOKEN_IDS} stop token ids", param="stop_token_ids")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)


def _in_range(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, got {value:g}", param=name)


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}", param=name)
