"""A tokenizer's tokens as bytes, from `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from inferd.engine.errors import LoadError, NotSupported
from inferd.engine.frontend.detokenize import BYTE_VALUES


@dataclass(frozen=True)
class Vocabulary:
    """What grammars know of a model's tokens.

    `tokens[id]` is what the token adds to a text, None for ids that never stand for text: special tokens and ids
    without a token. There are as many as the model has logits. `encode` is the model's own way to write a text, where
    it is known: what a grammar forces is then written as the model would.
    """

    tokens: tuple[bytes | None, ...]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Of a bitmask's row."""
        return (self.size + 31) // 32


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Raises `LoadError` for a file that cannot be read, `NotSupported` for a decoder whose bytes are not known."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise LoadError(f"{path} is not a tokenizer that can be read: {error}") from error
    to_bytes = _byte_form(json.loads(tokenizer.to_str())["decoder"])
    added = tokenizer.get_added_tokens_decoder()
    tokens: list[bytes | None] = [None] * vocab_size
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size or token_id in eos_token_ids:
            continue
        if token_id in added:
            tokens[token_id] = None if added[token_id].special else added[token_id].content.encode()
        else:
            tokens[token_id] = to_bytes(text) or None
    inside = tuple(dict.fromkeys(token_id for token_id in eos_token_ids if token_id < vocab_size))
    if not inside:
        raise NotSupported("structured output needs an end-of-sequence token, and this model has none")
    return Vocabulary(tuple(tokens), inside, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


def _byte_form(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """How a token of the file's own vocabulary becomes bytes, by the kind of its decoder."""
    steps = _flatten(decoder)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        names = ", ".join(sorted(kinds)) or "none"
        raise NotSupported(f"structured output knows no bytes of tokens for the tokenizer's decoder: {names}")
    replaced = [pair for step in steps if (pair := _replacement(step)) is not None]
    falls_back = "ByteFallback" in kinds

    def sentencepiece(text: str) -> bytes:
        if falls_back and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        for old, new in replaced:
            text = text.replace(old, new)
        return text.encode()

    return sentencepiece


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    """`Strip` takes a space from the beginning of a text, and an output is never the beginning of one."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        if pattern is None:
            raise NotSupported("structured output knows no bytes of tokens for a decoder that replaces by regex")
        return pattern, step["content"]
    return None


def _byte_level(text: str) -> bytes:
    try:
        return bytes([BYTE_VALUES[symbol] for symbol in text])
    except KeyError:  # a token outside the byte alphabet is its own text
        return text.encode()


def pack_bits(flags: Sequence[bool]) -> NDArray[np.int32]:
    """A bitmask's row, see `base.Row`."""
    padded = np.zeros((len(flags) + 31) // 32 * 32, np.bool_)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)


def set_bits(row: NDArray[np.int32], token_ids: Sequence[int], value: bool) -> None:
    """Allow or forbid single tokens in a bitmask's row."""
    words = row.view(np.uint32)
    for token_id in token_ids:
        bit = np.uint32(1 << token_id % 32)
        words[token_id // 32] = words[token_id // 32] | bit if value else words[token_id // 32] & ~bit


def is_set(row: NDArray[np.int32], token_id: int) -> bool:
    """Whether a bitmask's row allows a token; ids outside of it are not allowed."""
    return 0 <= token_id < 32 * len(row) and bool(int(row[token_id // 32]) >> token_id % 32 & 1)
