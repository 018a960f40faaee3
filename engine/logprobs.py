"""Log probabilities on their way from the workers to the front: packed arrays instead of an object per token. No torch.

They are those of the model's own distribution: before temperature, penalties and everything else that a request asks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import msgspec

NO_LOGPROBS = -2  # in an array of counts: none are wanted, not even the token's own
ALL_TOKENS = -1  # the whole vocabulary
_ITEM_BYTES = 4


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of p tokens in a row, in the machine's byte order.

    Each has `width` entries: the token itself, then the most likely ones, best first, which may name it again.
    """

    width: int
    token_ids: bytes  # [p, width] i32
    logprobs: bytes  # [p, width] f32
    ranks: bytes  # [p] i32, of the token itself: how many tokens are at least as likely, so 1 is the best

    @property
    def num_tokens(self) -> int:
        return len(self.ranks) // _ITEM_BYTES

    def cut(self, start: int, stop: int | None = None) -> TokenLogprobs:
        """Of tokens [start, stop)."""
        stop = self.num_tokens if stop is None else stop
        if start == 0 and stop >= self.num_tokens:
            return self
        wide = slice(start * self.width * _ITEM_BYTES, stop * self.width * _ITEM_BYTES)
        narrow = slice(start * _ITEM_BYTES, stop * _ITEM_BYTES)
        return TokenLogprobs(self.width, self.token_ids[wide], self.logprobs[wide], self.ranks[narrow])

    def entries(self) -> Iterator[tuple[list[int], list[float], int]]:
        """Per token: ids, log probabilities and its rank."""
        ids, logprobs, ranks = array("i", self.token_ids), array("f", self.logprobs), array("i", self.ranks)
        for index, rank in enumerate(ranks):
            part = slice(index * self.width, (index + 1) * self.width)
            yield ids[part].tolist(), logprobs[part].tolist(), rank


def join(parts: Iterable[TokenLogprobs]) -> TokenLogprobs:
    """One behind the other; all of one width, and nothing for no parts."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    return TokenLogprobs(
        parts[0].width if parts else 1,
        b"".join(part.token_ids for part in parts),
        b"".join(part.logprobs for part in parts),
        b"".join(part.ranks for part in parts),
    )


class PromptChunk(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of the prompt tokens from position `first` on. Position 0 has no log probability: nothing comes before it."""

    first: int
    logprobs: TokenLogprobs


class PromptLedger:
    """Those of one prompt while its chunks are computed; a preempted request may bring some of them again."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_expected = num_prompt_tokens - 1
        self._parts: list[TokenLogprobs] = []
        self._is_taken = False
        self.num_known = 0  # positions 1 to here

    @property
    def is_complete(self) -> bool:
        return self.num_known >= self._num_expected

    def add(self, chunk: PromptChunk) -> None:
        """Raises ValueError when tokens between what is known and this chunk are missing."""
        num_again = self.num_known + 1 - chunk.first
        if num_again < 0:
            raise ValueError(f"prompt logprobs from {chunk.first} on came, those from {self.num_known + 1} on are next")
        new = chunk.logprobs.cut(min(num_again, chunk.logprobs.num_tokens))
        if new.num_tokens:
            self._parts.append(new)
            self.num_known += new.num_tokens

    def take(self) -> TokenLogprobs | None:
        """All of them, once; None before they are complete, and ever after."""
        if self._is_taken or not self.is_complete:
            return None
        self._is_taken = True
        parts, self._parts = self._parts, []
        return join(parts)
