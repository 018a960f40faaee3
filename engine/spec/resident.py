"""The draft model of a worker: its weights, and its pages beside those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from inferd.engine.attention.base import AttentionBackend
from inferd.engine.attention.select import choose
from inferd.engine.config import EngineConfig, ParallelConfig
from inferd.engine.core.kv.plan import group_layers
from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup, KVSpec
from inferd.engine.errors import ConfigError
from inferd.engine.layers.target import TORCH_DTYPES
from inferd.engine.loader.base import load_model
from inferd.engine.messages import KV_CACHE
from inferd.engine.models.base import CausalLM
from inferd.engine.spec.draft import DraftLimits, DraftModel
from inferd.engine.worker.forward import EagerForward, KVMemory
from inferd.engine.worker.inputs import dummy_layout
from inferd.engine.worker.pools import Arena, FixedArena, Pools
from inferd.engine.worker.weights import LoadedWeights
from inferd.kernels.common.ops import Ops
from inferd.kernels.select import build_greedy


class ResidentDraft:
    """Lives as long as its worker, on one rank and whole. Weights and pages have the tags of the model's own."""

    def __init__(
        self, config: EngineConfig, ops: Ops, device: torch.device, pools: Pools, kv_specs: Mapping[str, KVSpec]
    ) -> None:
        """Loads. `kv_specs` are those of the worker's model. Raises LoadError for the checkpoint, ConfigError when
        nothing can attend for it here."""
        self._target = config
        self._config = draft_engine_config(config)
        self._device = device
        self._pools = pools
        self._model: CausalLM | None = None
        self._eager: EagerForward | None = None
        weights = LoadedWeights(
            self._config,
            device,
            lambda tensors: load_model(self._config, ops, device, tensors=tensors),
            self._take_model,
        )
        pools.add(weights)
        self._weights = weights
        groups = group_layers(kv_specs)
        self._group = self._mirror(groups[0].spec.block_size)
        self._backend = _choose_backend(self._config, ops, self._group.spec, device)
        own_bytes = KVCacheConfig(0, groups).block_bytes
        self.kv_share = own_bytes / (own_bytes + KVCacheConfig(0, (self._group,)).block_bytes)
        """Of the memory for keys and values: what the model's own may take."""

    @property
    def kv_caches(self) -> dict[str, Tensor]:
        """By layer; empty before `make_drafter`."""
        return self._eager.kv.caches if self._eager is not None else {}

    @property
    def decision(self) -> str:
        return f"draft model: {self._config.model.path.name}, attention: {self._backend.name}"

    def make_drafter(self, num_blocks: int, max_model_len: int) -> DraftModel:
        """With pages for as many blocks as the model has."""
        model = self._config.model
        limits = replace(self._config.scheduler, max_model_len=min(max_model_len, model.max_position))
        self._config = replace(self._config, scheduler=limits)
        self._eager = self._make_eager(num_blocks, self._pools.make_arena(KV_CACHE))
        greedy = build_greedy(self._device, self._config.kernels)
        draft_limits = DraftLimits(
            vocab_size=self._target.model.vocab_size,
            draft_vocab_size=model.vocab_size,
            max_positions=limits.max_model_len,
            max_pass_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs),
        )
        return DraftModel(self._eager, greedy, num_blocks, self._group.spec.block_size, draft_limits)

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, num_rows: int) -> None:
        """A pass over made-up rows, which stores nothing."""
        eager = self._eager or self._make_eager(1, FixedArena(KV_CACHE, self._device))
        left, lens = num_tokens - num_rows, []
        for _ in range(num_rows):
            lens.append(1 + min(left, self._config.scheduler.max_model_len - 1))
            left -= lens[-1] - 1
        eager.run(dummy_layout(lens, [self._group.spec.block_size]))

    def close(self) -> None:
        """Idempotent; for a worker that ends."""
        self._weights.close()
        self._eager = None

    def _take_model(self, model: CausalLM | None) -> None:
        self._model = model
        if self._eager is not None:
            self._eager.take_model(model)
            if model is not None:
                model.reserve_positions(self._config.scheduler.max_model_len)

    def _loaded(self) -> CausalLM:
        if self._model is None:
            raise RuntimeError("the draft model's weights were given back and are not there yet")
        return self._model

    def _mirror(self, block_size: int) -> KVCacheGroup:
        """Layers with a window keep everything too, since their blocks stay for as long as those of the model do."""
        specs = self._loaded().kv_specs(block_size)
        kinds = {KVSpec(spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype) for spec in specs.values()}
        if len(kinds) != 1:
            raise ConfigError(f"the draft model's layers keep different things per token: {kinds}; choose another one")
        return KVCacheGroup(tuple(specs), kinds.pop())

    def _make_eager(self, num_blocks: int, arena: Arena) -> EagerForward:
        model = self._loaded()
        model.reserve_positions(self._config.scheduler.max_model_len)
        caches = {name: self._pages(num_blocks, arena) for name in self._group.layer_names}
        return EagerForward(
            model, self._backend, KVMemory(KVCacheConfig(num_blocks, (self._group,)), caches), self._device
        )

    def _pages(self, num_blocks: int, arena: Arena) -> Tensor:
        """Of one layer; undefined content, since nothing is read before it is stored."""
        spec = self._group.spec
        raw = arena.empty(num_blocks * spec.page_bytes)
        return raw.view(TORCH_DTYPES[spec.dtype]).view(self._backend.kv_cache_shape(num_blocks, spec))


def draft_engine_config(config: EngineConfig) -> EngineConfig:
    """What the draft model is loaded with. Raises ValueError for an engine that has none."""
    speculative = config.speculative
    if speculative is None or speculative.model is None:
        raise ValueError("this engine has no draft model")
    max_model_len = min(config.scheduler.max_model_len, speculative.model.max_position)
    return replace(
        config,
        model=speculative.model,
        load_format=speculative.load_format,
        scheduler=replace(config.scheduler, max_model_len=max_model_len),
        parallel=ParallelConfig(),
        lora=None,
        speculative=None,
    )


def _choose_backend(config: EngineConfig, ops: Ops, spec: KVSpec, device: torch.device) -> AttentionBackend:
    backend = choose(config.attention_backend, ops, [spec], device, config.model.attention_softcap)
    if backend.page_sizes and spec.block_size not in backend.page_sizes:
        sizes = ", ".join(map(str, backend.page_sizes))
        raise ConfigError(
            f"the model's pages have {spec.block_size} tokens, which does not work for the draft model with attention "
            f"backend {backend.name}; it takes: {sizes}"
        )
    return backend
