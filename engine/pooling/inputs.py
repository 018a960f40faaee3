"""From a text, a pair of texts or token ids to a request for a vector or a score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from inferd.engine.errors import ContextLengthExceeded, InvalidRequest
from inferd.engine.frontend.inputs import (
    PreparedRequest,
    Prompt,
    RequestFields,
    TokensPrompt,
    assemble,
    check_fields,
    check_token_ids,
)
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.messages import EngineReady, PoolingInfo
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.pooling.checks import check_task
from inferd.engine.pooling.params import ALL_THAT_FITS, PoolingInput, PoolingParams


@dataclass(frozen=True)
class TextPair:
    """Two texts that a model reads together, such as a question and what may answer it."""

    first: str
    second: str


PoolingPrompt = Prompt | TextPair

_NO_SAMPLING = SamplingParams(max_tokens=1, output_kind=OutputKind.FINAL_ONLY)


class PoolingInputs:
    """Checks texts against one loaded model. Without a tokenizer only token ids are accepted."""

    def __init__(self, tokenizer: Tokenizer | None, ready: EngineReady) -> None:
        self._tokenizer = tokenizer
        self._ready = ready

    def process(self, prompt: PoolingPrompt, params: PoolingParams, **fields: Unpack[RequestFields]) -> PreparedRequest:
        """Raises `InvalidRequest` naming the field, `ContextLengthExceeded` for more than the model takes,
        `NotSupported` for a task that it does not have."""
        info = self._ready.pooling
        check_task(params, info)
        assert info is not None, "check_task refuses a model that does not pool"
        check_fields(fields)
        limit = self._limit(params)
        token_ids, types = self._tokens(prompt, limit, info)
        check_token_ids("prompt", token_ids, self._ready.vocab_size)
        if len(token_ids) > self._ready.max_model_len:
            raise ContextLengthExceeded(len(token_ids), self._ready.max_model_len, num_answer_tokens=0, param="input")
        text = prompt if isinstance(prompt, str) else None
        pooling = PoolingInput(params, types if info.num_token_types > 1 and any(types) else None)
        return assemble(token_ids, _NO_SAMPLING, text, _warnings(params, info), fields, pooling)

    def _limit(self, params: PoolingParams) -> int | None:
        limit, longest = params.truncate_prompt_tokens, self._ready.max_model_len
        if limit is not None and limit > longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens={limit} is above the {longest} tokens that this model takes; "
                f"{ALL_THAT_FITS} means as many as fit",
                param="truncate_prompt_tokens",
            )
        return longest if limit == ALL_THAT_FITS else limit

    def _tokens(self, prompt: PoolingPrompt, limit: int | None, info: PoolingInfo) -> tuple[list[int], list[int]]:
        """Ids, and which text each is of."""
        if isinstance(prompt, TokensPrompt):
            prompt = prompt.prompt_token_ids
        if isinstance(prompt, list):
            return list(prompt[:limit]), []
        texts: list[str] = [prompt.first, prompt.second] if isinstance(prompt, TextPair) else [prompt]
        if not all(isinstance(text, str) for text in texts):
            named = ", ".join(type(text).__name__ for text in texts)
            raise InvalidRequest(f"what is to be pooled is text or a list of token ids, not {named}", param="prompt")
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send token ids", param="prompt")
        if info.lower_case:
            texts = [text.lower() for text in texts]
        return self._tokenizer.encode_texts(*texts, max_tokens=limit)


def _warnings(params: PoolingParams, info: PoolingInfo) -> list[str]:
    if params.dimensions in (None, info.size) or info.matryoshka_sizes is not None:
        return []
    return [
        f"dimensions={params.dimensions}: this model was not trained for embeddings that are cut, they lose quality"
    ]
