"""What a caller may ask of one generation."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from inferd.engine.errors import InvalidRequest, check_unicode
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.logprobs import ALL_TOKENS

GREEDY_BELOW = 1e-5  # a temperature under this is greedy: dividing by it would overflow float32
MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CHOICES = 128
MAX_LOGPROBS = 20  # beside the token's own; `ALL_TOKENS` is more
MAX_LOGIT_BIASES = 300
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64  # of one of them
MAX_REPETITION_TOKENS = 4096  # pattern size times count: what is looked at after every token
_MAX_TOKEN_ID = 2**31 - 1


class OutputKind(enum.Enum):
    CUMULATIVE = "cumulative"  # every output holds the whole text so far
    DELTA = "delta"  # every output holds what is new
    FINAL_ONLY = "final_only"  # one output, at the end


class RepetitionDetection(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Ends a request whose output ends in `min_count` equal patterns of tokens, one right after the other."""

    max_pattern_size: int  # tokens
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        name = "repetition_detection"
        _whole(f"{name}.min_count", self.min_count, 2, MAX_REPETITION_TOKENS, param=name)
        _whole(f"{name}.min_pattern_size", self.min_pattern_size, 1, MAX_REPETITION_TOKENS, param=name)
        low, high = self.min_pattern_size, MAX_REPETITION_TOKENS // self.min_count
        _whole(f"{name}.max_pattern_size", self.max_pattern_size, low, high, param=name)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling and stopping of one request; valid once constructed.

    Raises `InvalidRequest` from the constructor (a `msgspec.ValidationError` when decoded), naming the field.
    `max_tokens=None` means all the room the context leaves.
    """

    n: int = 1  # answers to the one prompt; those after the first draw with the seeds that follow `seed`
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all tokens
    min_p: float = 0.0  # tokens this many times as likely as the best one stay
    seed: int | None = None  # -1: none
    repetition_penalty: float = 1.0  # of tokens in the prompt or the output: divides logits above 0, multiplies others
    presence_penalty: float = 0.0  # subtracted once for a token in the output
    frequency_penalty: float = 0.0  # subtracted for every time that a token is in the output
    logit_bias: dict[int, float] | None = None  # added to the logits of token ids
    allowed_token_ids: list[int] | None = None  # no others
    bad_words: list[str] = msgspec.field(default_factory=list)
    bad_words_token_ids: list[list[int]] = msgspec.field(
        default_factory=list
    )  # the same in tokens; the front adds here
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    repetition_detection: RepetitionDetection | None = None
    structured_output: StructuredOutput | None = None
    skip_special_tokens: bool = True
    shown_special_token_ids: list[int] = msgspec.field(default_factory=list)  # these stand in the text all the same
    logprobs: int | None = None  # per output token: its own and this many of the most likely; -1: of all tokens
    prompt_logprobs: int | None = None  # the same per prompt token
    extra_args: dict[str, Any] | None = None  # for logits processors that are not built in
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        stop = cast(object, self.stop)
        if isinstance(stop, str):  # what callers write for one stop string
            self.stop = [stop]
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        self._check_numbers()
        self._check_penalties()
        self._check_tokens()
        self._check_stops()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def _check_numbers(self) -> None:
        _whole("n", self.n, 1, MAX_CHOICES)
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0 and at most 1, got 0", param="top_p")
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _count("max_tokens", self.max_tokens, 1)
        _count("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", param="min_tokens"
            )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _whole(name, count, ALL_TOKENS, MAX_LOGPROBS)

    def _check_penalties(self) -> None:
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be above 0, got 0", param="repetition_penalty")
        if self.logit_bias is None:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequest(
                f"logit_bias has at most {MAX_LOGIT_BIASES} entries, got {len(self.logit_bias)}", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _whole("a token id in logit_bias", token_id, 0, _MAX_TOKEN_ID, param="logit_bias")
            _in_range(f"logit_bias of token {token_id}", bias, -100.0, 100.0, param="logit_bias")

    def _check_tokens(self) -> None:
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty; leave it out to allow all", param="allowed_token_ids")
            _token_ids("allowed_token_ids", self.allowed_token_ids)
        if len(self.bad_words) > MAX_BAD_WORDS or len(self.bad_words_token_ids) > 2 * MAX_BAD_WORDS:
            raise InvalidRequest(f"at most {MAX_BAD_WORDS} bad words", param="bad_words")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise InvalidRequest("a bad word must be a string that is not blank", param="bad_words")
            check_unicode("bad_words", word)
        for token_ids in self.bad_words_token_ids:
            if not 0 < len(token_ids) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(f"a bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens", param="bad_words")
            _token_ids("bad_words_token_ids", token_ids)

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
        _token_ids("stop_token_ids", self.stop_token_ids)
        _token_ids("shown_special_token_ids", self.shown_special_token_ids)


def without_grammar(params: SamplingParams) -> SamplingParams:
    """What workers are told. A grammar's bitmask also keeps `min_tokens`: it knows when nothing but the end is left."""
    if params.structured_output is None:
        return params
    return msgspec.structs.replace(params, structured_output=None, min_tokens=0)


def token_ids_in(params: SamplingParams) -> Iterable[tuple[str, list[int]]]:
    """Every list of token ids that `params` names, under its field: each must lie in the model's vocabulary."""
    yield "stop_token_ids", params.stop_token_ids
    yield "logit_bias", list(params.logit_bias or ())
    yield "allowed_token_ids", params.allowed_token_ids or []
    yield "shown_special_token_ids", params.shown_special_token_ids
    for token_ids in params.bad_words_token_ids:
        yield "bad_words", token_ids
    if params.structured_output is not None and params.structured_output.reasoning is not None:
        yield "structured_output", list(params.structured_output.reasoning)


def _token_ids(name: str, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        _whole(name, token_id, 0, _MAX_TOKEN_ID)


def _in_range(name: str, value: Any, low: float, high: float, *, param: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r}", param=param or name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, got {value:g}", param=param or name)


def _whole(name: str, value: Any, low: int, high: int, *, param: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, got {value!r}", param=param or name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}", param=param or name)


def _count(name: str, value: Any, low: int) -> None:
    """Of tokens: what the context has no room for is cut off later, so the only bound from above is what travels."""
    if not isinstance(value, bool) and isinstance(value, int) and value < low:
        raise InvalidRequest(f"{name} must be at least {low}, got {value}", param=name)
    _whole(name, value, low, 2**63 - 1)
