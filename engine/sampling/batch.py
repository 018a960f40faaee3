"""What the sampler needs about the rows of one step, and the per-row arrays that it is taken from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.params import SamplingParams
from inferd.engine.sampling.noise import uniform

ALL_TOKENS = 2**62  # a top-k that restricts nothing
_UINT64_MASK = 2**64 - 1


@dataclass(frozen=True)
class RandomRows:
    """The r rows of a step that draw a token, and how."""

    rows: list[int]  # their indices in the step's m rows
    temperature: Tensor  # [r] f32
    top_k: Tensor  # [r] i64, the vocabulary's size or more: all tokens
    top_p: Tensor  # [r] f64, 1: all tokens
    u: Tensor  # [r] f64, the row's noise in [0, 1)


@dataclass(frozen=True)
class SamplingBatch:
    """The m sampled rows of one step, as three disjoint sets that take different paths."""

    request_ids: list[str]
    greedy_rows: list[int]
    plain: RandomRows | None  # temperature alone
    restricted: RandomRows | None  # top-k or top-p as well
    banned: tuple[Tensor, Tensor] | None = None  # parallel rows and token ids, i64: below min_tokens

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def all_greedy(self) -> bool:
        return self.plain is None and self.restricted is None


class SamplingColumns:
    """The sampling parameters of every row of the persistent batch, one array a parameter."""

    def __init__(self, max_num_seqs: int, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self.greedy = np.ones(max_num_seqs, np.bool_)
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.top_k = np.full(max_num_seqs, ALL_TOKENS, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.stop_ids = np.empty(max_num_seqs, object)  # what min_tokens bans: end-of-sequence and stop tokens

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """All of the above: what moves when a row moves."""
        return [self.greedy, self.temperature, self.top_k, self.top_p, self.seed, self.min_tokens, self.stop_ids]

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        self.greedy[row] = params.greedy or params.top_k == 1
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k or ALL_TOKENS
        self.top_p[row] = params.top_p
        self.seed[row] = seed & _UINT64_MASK
        self.min_tokens[row] = params.min_tokens
        self.stop_ids[row] = sorted(self._eos_token_ids.union(params.stop_token_ids)) if params.min_tokens else None

    def select(
        self,
        rows: NDArray[np.intp],
        request_ids: list[str],
        num_tokens: NDArray[np.int64],
        num_output_tokens: NDArray[np.int64],
        device: torch.device,
    ) -> SamplingBatch:
        """The batch of `rows`; the counts are of the tokens that each of them knows before this one.

        A row's noise depends on its seed and `num_tokens` alone.
        """
        banned = self._banned(rows, num_output_tokens, device)
        greedy = self.greedy[rows]
        if greedy.all():
            return SamplingBatch(request_ids, list(range(len(rows))), None, None, banned)
        restricted = ~greedy & ((self.top_p[rows] < 1.0) | (self.top_k[rows] < ALL_TOKENS))
        return SamplingBatch(
            request_ids=request_ids,
            greedy_rows=np.flatnonzero(greedy).tolist(),
            plain=self._random(np.flatnonzero(~(greedy | restricted)), rows, num_tokens, device),
            restricted=self._random(np.flatnonzero(restricted), rows, num_tokens, device),
            banned=banned,
        )

    def _random(
        self, indices: NDArray[np.intp], rows: NDArray[np.intp], num_tokens: NDArray[np.int64], device: torch.device
    ) -> RandomRows | None:
        if not indices.size:
            return None
        mine = rows[indices]
        return RandomRows(
            rows=indices.tolist(),
            temperature=torch.from_numpy(self.temperature[mine]).to(device),
            top_k=torch.from_numpy(self.top_k[mine]).to(device),
            top_p=torch.from_numpy(self.top_p[mine]).to(device),
            u=torch.from_numpy(uniform(self.seed[mine], num_tokens[indices])).to(device),
        )

    def _banned(
        self, rows: NDArray[np.intp], num_output_tokens: NDArray[np.int64], device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        short = np.flatnonzero(num_output_tokens < self.min_tokens[rows]).tolist()
        pairs = [(index, token_id) for index in short for token_id in self.stop_ids[rows[index]]]
        if not pairs:
            return None
        indices, token_ids = torch.tensor(pairs, device=device).T
        return indices, token_ids
