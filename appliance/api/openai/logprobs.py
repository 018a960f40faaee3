"""Log probabilities in the forms that OpenAI's clients read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from inferd.appliance.api.openai.schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    LikelyToken,
    PromptLogprob,
    TokenLogprob,
)
from inferd.engine.frontend.logprobs import Logprob, TokenAlternatives
from inferd.engine.frontend.outputs import CompletionOutput
from inferd.engine.messages import FinishReason

IMPOSSIBLE = -9999.0  # JSON has no infinity

PromptAlternatives = Sequence[TokenAlternatives | None]


def chat_logprobs(completion: CompletionOutput, num_top: int, *, stop_is_shown: bool) -> ChatLogprobs | None:
    """Of the tokens that make up the text: a stop token is none of them, unless stops are shown. None for no tokens."""
    tokens = completion.logprobs or []
    ends_in_stop_token = completion.finish_reason is FinishReason.STOP and not isinstance(completion.stop_reason, str)
    if ends_in_stop_token and not stop_is_shown:
        tokens = tokens[:-1]
    if not tokens:
        return None
    return ChatLogprobs([_chat_token(alternatives, num_top) for alternatives in tokens])


def _chat_token(alternatives: TokenAlternatives, num_top: int) -> TokenLogprob:
    own = next(iter(alternatives.values()))
    likely = [LikelyToken(*_shown(other)) for other in _most_likely(alternatives, num_top)]
    return TokenLogprob(*_shown(own), likely)


def _shown(token: Logprob) -> tuple[str, float, list[int]]:
    return token.decoded_token, _finite(token.logprob), list(token.token_bytes)


def _most_likely(alternatives: TokenAlternatives, num_top: int) -> list[Logprob]:
    return sorted(alternatives.values(), key=lambda token: -token.logprob)[:num_top]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


class LegacyLogprobs:
    """The form of `/v1/completions`, for one choice: its offsets count on from one piece of a stream to the next."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0
        self._answer = CompletionLogprobs([], [], [], [])

    def echo(self, first_token: str, prompt: PromptAlternatives) -> None:
        """Puts a prompt in front; nothing is known of its first token but its text."""
        self._add(first_token, None, None)
        self._read(alternatives for alternatives in prompt if alternatives is not None)

    def take(self, tokens: Sequence[TokenAlternatives]) -> CompletionLogprobs | None:
        """These and what was put in front; None when that is nothing."""
        self._read(tokens)
        answer, self._answer = self._answer, CompletionLogprobs([], [], [], [])
        return answer if answer.tokens else None

    def _read(self, tokens: Iterable[TokenAlternatives]) -> None:
        for alternatives in tokens:
            own = next(iter(alternatives.values()))
            likely = _most_likely(alternatives, self._num_top)
            if own not in likely:
                likely.append(own)
            top = {token.decoded_token: _finite(token.logprob) for token in likely}
            self._add(own.decoded_token, _finite(own.logprob), top)

    def _add(self, token: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self._answer.tokens.append(token)
        self._answer.token_logprobs.append(logprob)
        self._answer.top_logprobs.append(top)
        self._answer.text_offset.append(self._offset)
        self._offset += len(token)


def prompt_logprobs(tokens: PromptAlternatives) -> list[Mapping[str, PromptLogprob] | None]:
    """By token id, as vLLM's clients read them."""
    return [
        None
        if alternatives is None
        else {
            str(token_id): PromptLogprob(_finite(token.logprob), token.rank, token.decoded_token)
            for token_id, token in alternatives.items()
        }
        for alternatives in tokens
    ]
