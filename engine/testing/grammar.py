"""A small vocabulary of bytes, and outputs drawn at random from what a matcher allows."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np

from inferd.engine.grammar.base import CompiledGrammar, GrammarBackend, Matcher
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.grammar.vocabulary import Vocabulary

PIECES = (
    *(b"true", b"false", b"null", b'": ', b'", ', b'{"', b'"}', b"},", b",}", b" \n", b"10", b".5", b"e-", b"ab"),
    *(b"\\n", b"\\u00", "é".encode(), "é".encode()[:1], "😀".encode(), "😀".encode()[:3]),
)
CLOSING = frozenset(b'"}]')  # characters that bring an output nearer to its end
EOS_ID = 256 + len(PIECES)


def byte_vocabulary() -> Vocabulary:
    """Ids 0 to 255 are the bytes, then come `PIECES`, the end of sequence, and two ids that are no tokens."""
    return Vocabulary((*(bytes([value]) for value in range(256)), *PIECES, None, None, None), (EOS_ID,))


def allowed_ids(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    row = np.full(vocabulary.num_words, -1, np.int32)
    matcher.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[vocabulary.size :].any(), "a bit is set beyond the vocabulary"
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def random_output(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, limit: int = 300) -> bytes | None:
    """The text of one output, None when it is not over after `limit` tokens.

    Now and then it goes back and comes again, which must change nothing. Raises AssertionError where the matcher
    contradicts itself.
    """
    token_ids: list[int] = []
    while len(token_ids) < limit:
        ids = allowed_ids(matcher, vocabulary)
        if rng.random() < 0.1 and token_ids:
            _go_back(matcher, token_ids, rng.randint(1, min(4, len(token_ids))))
            assert allowed_ids(matcher, vocabulary) == ids, "the mask differs after a rollback"
        assert matcher.is_completed() == (EOS_ID in ids)
        token_id = _choose(ids, rng)
        assert matcher.accept(token_id), f"token {token_id} is allowed and not accepted"
        if token_id == EOS_ID:
            assert matcher.is_terminated()
            assert not matcher.accept(token_id)
            return b"".join(vocabulary.tokens[past] or b"" for past in token_ids)
        token_ids.append(token_id)
    return None


def feed(matcher: Matcher, text: bytes) -> int:
    """How many bytes the matcher takes, one token each."""
    for count, value in enumerate(text):
        if not matcher.accept(value):
            return count
    return len(text)


def _choose(ids: Sequence[int], rng: random.Random) -> int:
    closing = [token_id for token_id in ids if token_id in CLOSING or token_id == EOS_ID]
    return rng.choice(closing if closing and rng.random() < 0.3 else ids)


def _go_back(matcher: Matcher, token_ids: list[int], num_tokens: int) -> None:
    matcher.rollback(num_tokens)
    for token_id in token_ids[-num_tokens:]:
        assert matcher.accept(token_id), "a token is not accepted a second time"


class InlineCompiler:
    """A manager's compiler without a child: compiles at once, or when `allowed` is set."""

    def __init__(self, backend: GrammarBackend) -> None:
        self._backend = backend
        self.allowed = threading.Event()
        self.allowed.set()
        self.num_compiled = 0

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        self.allowed.wait()
        self.num_compiled += 1
        return self._backend.load(spec, self._backend.compile(spec))

    def interrupt(self) -> None:
        self.allowed.set()

    def close(self) -> None:
        """Nothing is open."""
