"""Log probabilities of the model's own distribution, gathered for those who ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.logprobs import ALL_TOKENS, PromptChunk, TokenLogprobs, join
from inferd.engine.sampling.batch import LogprobRows, take_rows
from inferd.engine.upload import upload

PROMPT_PIECE_TOKENS = 128


@dataclass(frozen=True)
class Gathered:
    """On the device, until somebody waits for it."""

    token_ids: Tensor  # [r, width] i32
    logprobs: Tensor  # [r, width] f32
    ranks: Tensor  # [r] i32

    def pack(self) -> TokenLogprobs:
        """All r, as tokens in a row."""
        columns = (self.token_ids, self.logprobs, self.ranks)
        token_ids, logprobs, ranks = (np.ascontiguousarray(column.cpu().numpy()) for column in columns)
        return TokenLogprobs(token_ids.shape[1], token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes())


def gather(raw: Tensor, token_ids: Tensor, num_top: int) -> Gathered:
    """raw[r, vocab] f32 log probabilities, token_ids[r] i64: those tokens and the `num_top` best of each row.

    Equal ones are in order of their ids. The rank counts all tokens that are at least as likely.
    """
    chosen = token_ids[:, None]
    own = raw.gather(1, chosen)
    ranks = (raw >= own).sum(dim=-1, dtype=torch.int32)
    width = raw.shape[1] if num_top == ALL_TOKENS else min(num_top, raw.shape[1])
    if width:
        best_ids = raw.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
        best, order = raw.gather(1, best_ids).sort(dim=-1, descending=True, stable=True)
        chosen = torch.cat([chosen, best_ids.gather(1, order)], dim=1)
        own = torch.cat([own, best], dim=1)
    return Gathered(chosen.int(), own, ranks)


def prompt_chunk(
    first: int, target_ids: NDArray[np.int64], hidden: Tensor, compute_logits: Callable[[Tensor], Tensor], num_top: int
) -> PromptChunk:
    """Of the prompt tokens target_ids[c] at positions from `first` on; hidden[c, h] are of the tokens before them.

    Piece by piece, since logits of a long prompt would be gigabytes.
    """
    parts = []
    (targets,) = upload([target_ids], hidden.device)
    for start in range(0, len(targets), PROMPT_PIECE_TOKENS):
        piece = slice(start, start + PROMPT_PIECE_TOKENS)
        raw = torch.log_softmax(compute_logits(hidden[piece]).float(), dim=-1)
        parts.append(gather(raw, targets[piece], num_top).pack())
    return PromptChunk(first, join(parts))


class RawLogprobs:
    """Log probabilities of a step's rows, taken before the sampler changes the logits."""

    def __init__(self, logits: Tensor, groups: list[LogprobRows]) -> None:
        """logits[m, vocab]."""
        self._groups = groups
        self._raw = [torch.log_softmax(take_rows(logits, group.places).float(), dim=-1) for group in groups]

    def gather(self, token_ids: Tensor) -> list[Gathered]:
        """token_ids[m] as sampled: one part a group. Nothing waits for the device."""
        found = token_ids.clamp(min=0)  # a row that got no token is no one's business later on
        return [
            gather(raw, take_rows(found, group.places), group.num_top)
            for group, raw in zip(self._groups, self._raw, strict=True)
        ]

    def by_request(self, gathered: list[Gathered], request_ids: list[str]) -> dict[str, TokenLogprobs]:
        """Waits for them. `request_ids` are those of the m rows; those of one request follow one another."""
        found: dict[str, TokenLogprobs] = {}
        for group, part in zip(self._groups, gathered, strict=True):
            packed, start = part.pack(), 0
            for request_id, rows in groupby(request_ids[row] for row in group.rows):
                end = start + sum(1 for _ in rows)
                found[request_id] = packed.cut(start, end)
                start = end
        return found
