"""What the sampler needs about the rows of one step, and the per-row arrays that it is taken from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.logprobs import NO_LOGPROBS
from inferd.engine.params import SamplingParams
from inferd.engine.sampling.chain import LogitsEdits
from inferd.engine.sampling.noise import PLAIN, RETRIES, uniform
from inferd.engine.upload import upload

ALL_TOKENS = 2**62  # a top-k that restricts nothing
_UINT64_MASK = 2**64 - 1


@dataclass(frozen=True)
class RandomRows:
    """The r rows of a step that draw a token, and how. What is said twice spares the sampler a look at the device."""

    rows: list[int]  # their indices in the step's m rows, ascending
    places: Tensor | None  # [r] i64, the same on the device; None when they are all m
    temperature: Tensor  # [r] f32
    top_k: Tensor  # [r] i64, the vocabulary's size or more: all tokens
    top_p: Tensor  # [r] f64, 1: all tokens
    min_p: Tensor  # [r] f32, 0: all tokens
    u: Tensor  # [r, 1 + retries] f64, the row's noise in [0, 1); without top-p only the first column is used
    max_top_k: int | None = field(default=None, kw_only=True)  # the largest that restricts; None when none does
    any_top_p: bool = field(default=False, kw_only=True)
    any_min_p: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class LogprobRows:
    """Rows of a step that want the log probabilities of equally many tokens."""

    num_top: int  # beside the drawn one; -1: all of the vocabulary
    rows: list[int]  # their indices in the step's m rows, ascending
    places: Tensor | None  # [r] i64, the same on the device; None when they are all m


@dataclass(frozen=True)
class SamplingBatch:
    """The m sampled rows of one step. Those that are not random are greedy."""

    request_ids: list[str]
    random: RandomRows | None = None
    edits: LogitsEdits | None = None  # None when no request asks for any
    logprobs: list[LogprobRows] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def all_greedy(self) -> bool:
        return self.random is None

    @property
    def takes_the_greatest(self) -> bool:
        """Each row's token is that of its greatest logit, as the model computed them."""
        return self.random is None and (self.edits is None or not self.edits.for_all_rows)


class SamplingColumns:
    """The sampling parameters of every row of the persistent batch, one array a parameter."""

    def __init__(self, max_num_seqs: int) -> None:
        self.greedy = np.ones(max_num_seqs, np.bool_)
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.top_k = np.full(max_num_seqs, ALL_TOKENS, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """All of the above: what moves when a row moves."""
        limits: list[NDArray[Any]] = [self.temperature, self.top_k, self.top_p, self.min_p]
        return [self.greedy, *limits, self.seed, self.logprobs, self.prompt_logprobs]

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        self.greedy[row] = params.greedy or params.top_k == 1
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k or ALL_TOKENS
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed & _UINT64_MASK
        self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.prompt_logprobs[row] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs

    def select(
        self,
        rows: NDArray[np.intp],
        request_ids: list[str],
        num_tokens: NDArray[np.int64],
        device: torch.device,
        edits: LogitsEdits | None = None,
    ) -> SamplingBatch:
        """The batch of `rows`; `num_tokens` counts the tokens that each of them knows before this one.

        A row's noise depends on its seed and `num_tokens` alone.
        """
        return SamplingBatch(
            request_ids=request_ids,
            random=self._random(np.flatnonzero(~self.greedy[rows]), rows, num_tokens, device),
            edits=edits,
            logprobs=self._logprobs(self.logprobs[rows], device),
        )

    def _random(
        self, indices: NDArray[np.intp], rows: NDArray[np.intp], num_tokens: NDArray[np.int64], device: torch.device
    ) -> RandomRows | None:
        if not indices.size:
            return None
        mine = rows[indices]
        top_k, top_p, min_p = self.top_k[mine], self.top_p[mine], self.min_p[mine]
        any_top_p = bool((top_p < 1.0).any())
        streams = (PLAIN, *RETRIES) if any_top_p else (PLAIN,)
        seeds, positions = self.seed[mine], num_tokens[indices]
        u = np.stack([uniform(seeds, positions, stream) for stream in streams], axis=1)
        columns = upload([indices, self.temperature[mine], top_k, top_p, min_p, u], device)
        limited = top_k[top_k < ALL_TOKENS]
        return RandomRows(
            indices.tolist(),
            None if len(indices) == len(rows) else columns[0],
            *columns[1:],
            max_top_k=int(limited.max()) if limited.size else None,
            any_top_p=any_top_p,
            any_min_p=bool(min_p.any()),
        )

    @staticmethod
    def _logprobs(wanted: NDArray[np.int64], device: torch.device) -> list[LogprobRows]:
        if (wanted == NO_LOGPROBS).all():
            return []
        groups = []
        for num_top in np.unique(wanted[wanted != NO_LOGPROBS]).tolist():
            indices = np.flatnonzero(wanted == num_top)
            places = None if len(indices) == len(wanted) else upload([indices], device)[0]
            groups.append(LogprobRows(num_top, indices.tolist(), places))
        return groups


def take_rows(tensor: Tensor, places: Tensor | None) -> Tensor:
    """The rows at `places`; no copy when they are all there are."""
    return tensor if places is None else tensor[places]
