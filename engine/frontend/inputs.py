"""From what a caller gives to an `AddRequest` that the engine cannot refuse."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TypedDict, Unpack, cast

import msgspec

from inferd.engine.errors import ContextLengthExceeded, InvalidRequest, check_unicode
from inferd.engine.frontend.lora import LoRARequest
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.messages import AddRequest, MultimodalFeature, PoolingInfo
from inferd.engine.params import SamplingParams, token_ids_in
from inferd.engine.pooling.checks import refuse_generation
from inferd.engine.pooling.params import PoolingInput


@dataclass(frozen=True)
class TokensPrompt:
    prompt_token_ids: list[int]
    prompt: str | None = None  # the text behind them, only to be shown


Prompt = str | list[int] | TokensPrompt


class RequestFields(TypedDict, total=False):
    """What may be said about a request beside its prompt and params; see `AddRequest`."""

    request_id: str  # any name, repeats are fine; drawn when left out
    priority: int
    client: str
    lane: str
    cache_salt: str | None
    features: list[MultimodalFeature] | None
    lora_request: LoRARequest | None


@dataclass(frozen=True)
class PreparedRequest:
    """`request_id` is the caller's and may repeat; `add.request_id` is unique in this process."""

    request_id: str
    add: AddRequest
    prompt: str | None
    warnings: list[str]  # what was changed so that the request can be served

    def split_choices(self) -> list[AddRequest]:
        """What the engine gets: a request for each of the n answers, with a seed of its own where one is given.

        The prompt's log probabilities are computed for the first of them alone.
        """
        params = self.add.params
        if params.n == 1:
            return [self.add]
        adds = []
        for index in range(params.n):
            own = msgspec.structs.replace(
                params,
                n=1,
                seed=None if params.seed is None else _seed_after(params.seed, index),
                prompt_logprobs=None if index else params.prompt_logprobs,
            )
            adds.append(msgspec.structs.replace(self.add, request_id=f"{self.add.request_id}-{index}", params=own))
        return adds


class InputProcessor:
    """Checks prompts against one loaded model. Without a tokenizer only token ids are accepted."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        vocab_size: int,
        pooling: PoolingInfo | None = None,
    ) -> None:
        """`pooling`: of a model that pools, and then generates nothing."""
        self._tokenizer = tokenizer
        self._pooling = pooling
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    def process(self, prompt: Prompt, params: SamplingParams, **fields: Unpack[RequestFields]) -> PreparedRequest:
        """Raises `InvalidRequest` naming the field, `ContextLengthExceeded` when no token could be generated."""
        refuse_generation(self._pooling.tasks if self._pooling is not None else ())
        check_fields(fields)
        text, token_ids = self._tokens(prompt)
        self._check_token_ids("prompt", token_ids)
        params = self._with_bad_words(params)
        self._check_params(params)
        room = self._max_model_len - len(token_ids)
        if room < 1:
            raise ContextLengthExceeded(len(token_ids), self._max_model_len)
        params, warnings = fit_max_tokens(params, room)
        return assemble(token_ids, params, text, warnings, fields)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, TokensPrompt):
            return prompt.prompt, list(prompt.prompt_token_ids)
        if isinstance(prompt, list):
            return None, list(prompt)
        if not isinstance(prompt, str):
            raise InvalidRequest(
                f"a prompt is text or a list of token ids, not {type(prompt).__name__}", param="prompt"
            )
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send the prompt as token ids", param="prompt")
        return prompt, self._tokenizer.encode(prompt)

    def _check_token_ids(self, name: str, token_ids: list[int]) -> None:
        check_token_ids(name, token_ids, self._vocab_size)

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop and self._tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer; use stop_token_ids", param="stop")
        for name, token_ids in token_ids_in(params):
            self._check_token_ids(name, token_ids)

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Each bad word in tokens, as it stands at a text's beginning and behind a space."""
        if not params.bad_words:
            return params
        if self._tokenizer is None:
            raise InvalidRequest("bad words need a tokenizer; use bad_words_token_ids", param="bad_words")
        found = [*params.bad_words_token_ids]
        for word in params.bad_words:
            for text in dict.fromkeys((word.lstrip(), " " + word.lstrip())):
                token_ids = self._tokenizer.encode(text, add_special_tokens=False)
                if token_ids and token_ids not in found:
                    found.append(token_ids)
        return msgspec.structs.replace(params, bad_words_token_ids=found)


def check_fields(fields: RequestFields) -> None:
    for name in ("request_id", "client", "lane", "cache_salt"):
        check_unicode(name, cast(str | None, fields.get(name)))
    lora = fields.get("lora_request")
    check_unicode("lora_request", lora.lora_name if lora is not None else None)


def assemble(
    token_ids: list[int],
    params: SamplingParams,
    text: str | None,
    warnings: list[str],
    fields: RequestFields,
    pooling: PoolingInput | None = None,
) -> PreparedRequest:
    """From what has been checked; the time of arrival is now."""
    request_id = fields.get("request_id") or f"gen-{secrets.token_hex(8)}"
    lora = fields.get("lora_request")
    add = AddRequest(
        request_id=f"{request_id}-{secrets.token_hex(4)}",
        prompt_token_ids=token_ids,
        params=params,
        arrival_time_s=time.time(),
        priority=fields.get("priority", 0),
        client=fields.get("client", "local"),
        lane=fields.get("lane", "interactive"),
        cache_salt=fields.get("cache_salt"),
        features=fields.get("features"),
        pooling=pooling,
        name=request_id,
        lora=lora.lora_name if lora is not None else None,
    )
    return PreparedRequest(request_id, add, text, warnings)


def check_token_ids(name: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` naming the field."""
    if name == "prompt" and not token_ids:
        raise InvalidRequest("the prompt is empty; give at least one token", param=name)
    for token_id in token_ids:
        if type(token_id) is not int:
            raise InvalidRequest(f"a token id is a whole number, got {token_id!r}", param=name)
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"token id {bad} is outside the model's vocabulary, 0 to {vocab_size - 1}", param=name)


def _seed_after(seed: int, index: int) -> int:
    """`seed + index` within 64 bits; not -1, which would be no seed."""
    following = (seed + index + 2**63) % 2**64 - 2**63
    return following if following != -1 else -(2**63)


def fit_max_tokens(params: SamplingParams, room: int) -> tuple[SamplingParams, list[str]]:
    """Params whose `max_tokens` is set and at most `room`, and a sentence when that took something away."""
    if params.max_tokens is not None and params.max_tokens <= room:
        return params, []
    warnings = []
    if params.max_tokens is not None:
        warnings.append(f"max_tokens lowered from {params.max_tokens} to {room}: the context has no more room")
    if params.min_tokens > room:
        warnings.append(f"min_tokens lowered from {params.min_tokens} to {room}: the context has no more room")
    return msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room)), warnings
