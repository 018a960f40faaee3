"""Requests and answers of the OpenAI routes, as msgspec structs.

Requests ignore keys that they do not know. Answers leave out what has no value: strict clients stumble over nulls
where a key should be absent, except `finish_reason`, which is null until it is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from inferd.appliance.api.errors import bad_request
from inferd.appliance.api.wording import in_plain_words
from inferd.appliance.chat.messages import ChatMessage

Finish = Literal["stop", "length", "tool_calls"]
RequestT = TypeVar("RequestT", bound="GenerationRequest")

# --- requests -------------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionRequest(msgspec.Struct):
    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and completions have in common. Ranges are checked by `SamplingParams`."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repetition_detection: RepetitionRequest | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | bool | None = None


# --- answers --------------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class LikelyToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token; a prompt's first token has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[Mapping[str, PromptLogprob] | None]


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct):
    """The first one of a call has everything; clients join the strings of later ones, so these only have arguments."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: Finish | None = None
    logprobs: ChatLogprobs | msgspec.UnsetType | None = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct):
    content: str | None  # None beside calls without a text
    role: Literal["assistant"] = "assistant"
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    finish_reason: Finish
    logprobs: ChatLogprobs | msgspec.UnsetType | None = msgspec.UNSET


class ChatAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion"] = "chat.completion"


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: Finish | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(msgspec.Struct):
    """Also one chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str
    parent: str | None = None
    owned_by: str = "inferd"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


# --- reading --------------------------------------------------------------------------------------------------------


class Asks(Protocol):
    model: str


AsksT = TypeVar("AsksT", bound=Asks)


def read_fields(body: dict[str, Any], kind: type[AsksT]) -> AsksT:
    """Raises a 400 naming the field."""
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        text, param = in_plain_words(error)
        raise bad_request(text, param=param) from None
    if not request.model:
        raise bad_request("model is empty; GET /v1/models lists the ids", param="model")
    return request


def parse_request(body: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """As `read_fields`, of a request that generates."""
    request = read_fields(body, kind)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
    return request
