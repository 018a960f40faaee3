"""Log probabilities as a caller reads them, each with the text of its token."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from inferd.engine.frontend.detokenize import byte_level_bytes, fallback_byte
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int  # 1: the most likely
    decoded_token: str  # what it adds to the text here: nothing while it leaves a character unfinished
    token_bytes: bytes  # all of its own


TokenAlternatives = dict[int, Logprob]  # by token id: the token itself first, then the most likely ones, best first


class TokenBytes:
    """The bytes that each token stands for. Those of a text's tokens, joined, are the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._anchor = [] if tokenizer.is_byte_level else tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_length = len(tokenizer.decode(self._anchor))

    def of(self, token_id: int) -> bytes:
        """Nothing for an id without a token."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._tokenizer.is_byte_level:
            return byte_level_bytes(token)
        byte = fallback_byte(token)
        if byte is not None:
            return byte
        # Behind an ordinary word, or the decoder would strip a leading space.
        text = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        return text[self._anchor_length :].encode()


class LogprobReader:
    """Reads the log probabilities of one text, token after token."""

    def __init__(self, token_bytes: TokenBytes | None) -> None:
        """Without a tokenizer every token's text is empty."""
        self._token_bytes = token_bytes
        self._unfinished = b""  # beginning of a character

    def read(self, logprobs: TokenLogprobs) -> list[TokenAlternatives]:
        """One entry a token. Alternatives are decoded as if they stood in the token's place."""
        read = []
        for token_ids, values, rank in logprobs.entries():
            alternatives: TokenAlternatives = {}
            for place, (token_id, value) in enumerate(zip(token_ids, values, strict=True)):
                if token_id not in alternatives:
                    own_rank = place or rank
                    alternatives[token_id] = Logprob(value, own_rank, *self._decode(token_id))
            self._pass(token_ids[0])
            read.append(alternatives)
        return read

    def _decode(self, token_id: int) -> tuple[str, bytes]:
        if self._token_bytes is None:
            return "", b""
        own = self._token_bytes.of(token_id)
        return _utf8().decode(self._unfinished + own), own

    def _pass(self, token_id: int) -> None:
        """The text goes on behind this token."""
        if self._token_bytes is not None:
            decoder = _utf8()
            decoder.decode(self._unfinished + self._token_bytes.of(token_id))
            self._unfinished = decoder.getstate()[0]


def _utf8() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
