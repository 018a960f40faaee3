"""Speculation in one worker, from loading to its drafts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from inferd.engine.config import EngineConfig, SpeculativeConfig
from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.spec.drafting import Drafting
from inferd.engine.spec.ngram import NgramDrafter
from inferd.engine.spec.resident import ResidentDraft
from inferd.engine.worker.pools import Pools
from inferd.kernels.common.ops import Ops

DRAFTING_RANK = 0  # the one whose results count; its guesses reach the others with the next step


class RankSpeculation:
    """One rank guesses for all; on the others, and without speculation, there is nothing to do."""

    def __init__(self, config: SpeculativeConfig | None = None, draft: ResidentDraft | None = None) -> None:
        self._config = config
        self._draft = draft

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        rank: int,
        ops: Ops,
        device: torch.device,
        pools: Pools,
        kv_specs: Mapping[str, KVSpec],
    ) -> RankSpeculation:
        """`kv_specs` are those of the rank's model. Raises as `ResidentDraft`."""
        if config.speculative is None or rank != DRAFTING_RANK:
            return cls()
        has_model = config.speculative.model is not None
        draft = ResidentDraft(config, ops, device, pools, kv_specs) if has_model else None
        return cls(config.speculative, draft)

    @property
    def kv_share(self) -> float:
        """Of the memory for keys and values: what the model's own may take."""
        return self._draft.kv_share if self._draft is not None else 1.0

    @property
    def kv_caches(self) -> dict[str, Tensor]:
        """The draft model's, by layer."""
        return self._draft.kv_caches if self._draft is not None else {}

    @property
    def decisions(self) -> list[str]:
        return [self._draft.decision] if self._draft is not None else []

    def make_drafting(self, num_blocks: int, max_model_len: int) -> Drafting | None:
        """Once memory is planned."""
        if self._config is None:
            return None
        if self._draft is not None:
            return Drafting(self._draft.make_drafter(num_blocks, max_model_len))
        return Drafting(NgramDrafter(self._config.prompt_lookup_min, self._config.prompt_lookup_max))

    def dummy_run(self, num_tokens: int, num_rows: int) -> None:
        """What drafting may cost at most; stores nothing."""
        if self._draft is not None:
            self._draft.dummy_run(num_tokens, num_rows)

    def close(self) -> None:
        """Idempotent; for a worker that ends."""
        if self._draft is not None:
            self._draft.close()
