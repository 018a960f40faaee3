"""The seams between the engine and the libraries that know grammars."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inferd.engine.grammar.spec import StructuredOutput

Row = NDArray[np.int32]  # [ceil(vocab / 32)], bit `id % 32` of word `id // 32`: whether the token may come next


class CannotExpress(Exception):
    """A backend cannot hold an output to this form; the next one may. The text names the keyword or the place."""


class Matcher(Protocol):
    """Where one output stands in its grammar. Any exception out of it ends that request alone."""

    def accept(self, token_id: int) -> bool:
        """Move on; False, and nothing changed, for a token that may not come here.

        An end-of-sequence token is accepted where the output may end.
        """
        ...

    def fill_bitmask(self, row: Row) -> None:
        """Write all of `row`. Bits of ids outside the tokenizer stay 0; the ends of sequence count as tokens."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens, an end of sequence included."""
        ...

    def is_terminated(self) -> bool:
        """Whether an end of sequence was accepted."""
        ...

    def is_completed(self) -> bool:
        """Whether the output may end here."""
        ...


class CompiledGrammar(Protocol):
    """A grammar ready for use; many requests share it, so it never changes."""

    @property
    def size_bytes(self) -> int:
        """About what it holds of memory."""
        ...

    def make_matcher(self) -> Matcher: ...


class GrammarBackend(Protocol):
    """One library, bound to one vocabulary.

    `compile` may take any time and any memory, so it runs in a child that can be killed; what it returns crosses to the
    engine, where `load` must be quick.
    """

    def refusal(self, spec: StructuredOutput) -> str | None:
        """What of this form the backend cannot enforce; quick, and without the library."""
        ...

    def compile(self, spec: StructuredOutput) -> bytes:
        """The compiled grammar in bytes, or nothing where it has no such form and `load` builds it anew.

        Raises `CannotExpress`.
        """
        ...

    def load(self, spec: StructuredOutput, compiled: bytes) -> CompiledGrammar:
        """From what `compile` returned for the same spec and vocabulary."""
        ...
