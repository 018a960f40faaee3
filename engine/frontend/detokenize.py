"""Token ids to text while they come: no half characters, nothing of a stop string before it is known not to be one."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.params import SamplingParams

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes, hence four byte-fallback tokens


class TokenDecoder(Protocol):
    """Turns one token after the other into text. What it has not returned yet is at most one unfinished character."""

    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """The unfinished rest, as U+FFFD."""
        ...


class ByteLevelDecoder:
    """For byte-level BPE, where each token is a byte string: exact and linear for any bytes.

    The stream decoder of `tokenizers` is not used: it returns nothing for as long as text ends in U+FFFD, so a model
    that emits an invalid byte again and again is never heard of, at growing cost.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: Collection[int] = ()) -> None:
        self._backend = tokenizer.backend
        self._skipped = tokenizer.special_ids.difference(shown) if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        token = self._backend.id_to_token(token_id)
        return "" if token is None else self._utf8.decode(byte_level_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other tokenizer: decodes the tokens since the last whole character, behind an anchor token.

    The anchor is an ordinary word, so that the decoder does not strip a leading space from a text's middle. Tokens are
    held while their text ends in U+FFFD, but never more of them than a character can have. Byte tokens are decoded
    here: the library gives up a whole run of them for one invalid byte.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown = tokenizer.special_ids.intersection(shown) if skip_special_tokens else frozenset()
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_length = len(self._decode([]))
        self._pending: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        token = self._tokenizer.backend.id_to_token(token_id) or ""
        if token_id in self._shown:
            return self.flush() + token
        byte = fallback_byte(token)
        if byte is not None:
            return self._release() + self._utf8.decode(byte)
        emitted = self._utf8.decode(b"", final=True)
        self._pending.append(token_id)
        while self._pending:
            text = self._decode(self._pending)[self._anchor_length :]
            if not text.endswith(REPLACEMENT):
                self._pending.clear()
                return emitted + text
            if len(self._pending) < MAX_CHARACTER_TOKENS:
                break
            emitted += self._decode([self._pending.pop(0)])[self._anchor_length :]
        return emitted

    def flush(self) -> str:
        return self._release() + self._utf8.decode(b"", final=True)

    def _release(self) -> str:
        if not self._pending:
            return ""
        text = self._decode(self._pending)[self._anchor_length :]
        self._pending.clear()
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(self._anchor + token_ids, skip_special_tokens=self._skip)


def make_decoder(tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: Collection[int] = ()) -> TokenDecoder:
    """`shown` are special tokens that stand in the text though others are skipped."""
    kind = ByteLevelDecoder if tokenizer.is_byte_level else WindowDecoder
    return kind(tokenizer, skip_special_tokens=skip_special_tokens, shown=shown)


class StopStringFilter:
    """Passes text on, except an end that could be the beginning of a stop string.

    The stop string that is complete first wins, and the longest of those that end together: so the result does not
    depend on how the text was cut.
    """

    def __init__(self, stops: list[str], *, include_stop: bool) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Text that may go out, and the stop string that `text` completed. Unarmed, it completes none."""
        if not self._stops or not text:
            return text, None
        buffer = self._held + text
        found = self._first_match(buffer) if armed else None
        if found is None:
            safe = len(buffer) - self._num_held(buffer)
            self._held = buffer[safe:]
            return buffer[:safe], None
        start, stop = found
        self._held = ""
        return buffer[: start + len(stop) if self._include_stop else start], stop

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        """Only a match that ends in new text counts: what was held whole was passed over while unarmed."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0] + len(best[1])):
                best = (start, stop)
        return best

    def _num_held(self, buffer: str) -> int:
        """The longest end of `buffer` that is a proper beginning of a stop string."""
        for length in range(min(len(self._stops[0]) - 1, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True)
class Detokenized:
    text: str  # new since the last update
    num_tokens: int  # of those given, how many belong to the output
    stop: str | None = None  # the stop string that ended it


class IncrementalDetokenizer:
    """The text of one request. All texts of its updates and of `finish` joined are its output."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = make_decoder(
            tokenizer, skip_special_tokens=params.skip_special_tokens, shown=params.shown_special_token_ids
        )
        self._filter = StopStringFilter(params.stop, include_stop=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._include_stop_token = params.include_stop_str_in_output
        self._num_tokens = 0

    def update(self, token_ids: list[int], *, ends_in_stop_token: bool = False) -> Detokenized:
        """A stop token stays in the ids and out of the text, unless stops were asked to be included.

        A stop string counts when a token after the first `min_tokens` completes it; tokens after it are not counted.
        """
        parts = []
        for position, token_id in enumerate(token_ids):
            if ends_in_stop_token and position == len(token_ids) - 1 and not self._include_stop_token:
                break
            self._num_tokens += 1
            text, stop = self._filter.feed(self._decoder.feed(token_id), armed=self._num_tokens > self._min_tokens)
            parts.append(text)
            if stop is not None:
                return Detokenized("".join(parts), position + 1, stop)
        return Detokenized("".join(parts), len(token_ids))

    def finish(self) -> str:
        """What was held back; not to be called after a stop string ended the output."""
        text, _ = self._filter.feed(self._decoder.flush(), armed=False)
        return text + self._filter.flush()


def fallback_byte(token: str) -> bytes | None:
    """What a token of the form <0xC3> stands for: SentencePiece vocabularies write bytes so that have no token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match is not None else None


def byte_level_bytes(token: str) -> bytes:
    """What a token of a byte-level vocabulary stands for."""
    try:
        return bytes([BYTE_VALUES[symbol] for symbol in token])
    except KeyError:  # an added token is its own text
        return token.encode("utf-8")


def _byte_values() -> dict[str, int]:
    """The byte behind each printable character of byte-level BPE (Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_VALUES = _byte_values()
