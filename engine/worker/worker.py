"""One rank: its device, its model, its memory."""

from __future__ import annotations

import logging
from typing import Any

import psutil
import torch
from torch import Tensor

from inferd.engine.attention.base import AttentionBackend
from inferd.engine.attention.select import choose
from inferd.engine.config import EngineConfig
from inferd.engine.core.kv.spec import KVCacheConfig, KVCacheGroup, KVSpec
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.errors import ConfigError, NotSupported
from inferd.engine.layers.target import TORCH_DTYPES
from inferd.engine.loader.base import load_model
from inferd.engine.models.base import CausalLM
from inferd.engine.worker.memory import cpu_kv_bytes, requested_bytes
from inferd.engine.worker.runner import KVMemory, ModelRunner
from inferd.kernels.common.ops import KernelUnavailable, Ops
from inferd.kernels.select import build_ops

logger = logging.getLogger(__name__)

CPU_WARM_UP = (64, 4)  # tokens and rows: nothing is captured there, and a full budget would take seconds


class Worker:
    """`load`, then `initialize_kv_cache`, then `warm_up`, then steps; out of this order raises RuntimeError."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError when the device's memory is not there to take."""
        self._config = config
        self._device = torch.device(config.device)
        torch.set_num_threads(config.num_threads)
        self._budget = _DeviceBudget(config.cache.memory_fraction) if config.device == "cuda" else None
        self._model: CausalLM | None = None
        self._backend: AttentionBackend | None = None
        self._kv: KVMemory | None = None
        self._runner: ModelRunner | None = None
        self._decisions: list[str] = []

    @property
    def decisions(self) -> list[str]:
        """A sentence per choice that this worker made while loading."""
        return self._decisions

    @property
    def kv_caches(self) -> dict[str, Tensor]:
        """Layer name → its keys and values, as the attention backend views them."""
        if self._kv is None:
            raise RuntimeError("the worker has no KV cache yet: initialize_kv_cache comes first")
        return self._kv.caches

    def load(self) -> None:
        """Raises LoadError for the checkpoint, ConfigError for kernels or a backend that cannot serve it here."""
        if self._model is not None:
            raise RuntimeError("the worker was asked to load a second time")
        ops = self._build_ops()
        model = load_model(self._config, ops, self._device)
        self._backend = self._choose_backend(ops, _only(model.kv_specs(self._config.cache.block_size)))
        self._decisions += [*ops.decisions, f"attention: {self._backend.name}"]
        self._model = model

    def kv_specs(self) -> dict[str, KVSpec]:
        return self._loaded()[0].kv_specs(self._config.cache.block_size)

    def available_kv_bytes(self) -> int:
        """`kv_cache_bytes` where given, else what memory allows; measured with the largest step on an accelerator."""
        specs = self.kv_specs()
        if self._config.cache.kv_cache_bytes is not None:
            return self._config.cache.kv_cache_bytes
        if self._budget is None:
            return cpu_kv_bytes(self._config, list(specs.values()), psutil.virtual_memory().available)
        group = KVCacheGroup(tuple(specs), _only(specs))
        self._make_runner(KVCacheConfig(1, (group,)))[1].dummy_run(*self._largest_step())
        return self._budget.left_bytes()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._loaded()
        if self._runner is not None:
            raise RuntimeError("the worker's KV cache was initialised already")
        self._kv, self._runner = self._make_runner(config)
        num_bytes = sum(cache.nbytes for cache in self._kv.caches.values())
        logger.info("KV cache: %d blocks, %.2f GiB", config.num_blocks, num_bytes / 2**30)

    def warm_up(self) -> None:
        """The largest step first, then the smallest; keeps nothing and stores nothing."""
        runner = self.runner
        num_tokens, num_rows = self._largest_step()
        if self._config.device == "cpu":
            num_tokens, num_rows = min(num_tokens, CPU_WARM_UP[0]), min(num_rows, CPU_WARM_UP[1])
        runner.dummy_run(num_tokens, num_rows)
        runner.dummy_run(1, 1)

    def execute_model(self, output: SchedulerOutput) -> None:
        self.runner.execute(output)

    def sample_tokens(self, bitmask: Any | None = None) -> ModelRunnerOutput:
        return self.runner.sample(bitmask)

    def shutdown(self) -> None:
        """Let go of the model and its memory. Idempotent."""
        self._model = self._backend = self._kv = self._runner = None

    def _build_ops(self) -> Ops:
        try:
            return build_ops(self._device, TORCH_DTYPES[self._config.dtype], self._config.kernels)
        except KernelUnavailable as error:
            raise ConfigError(str(error)) from error

    def _choose_backend(self, ops: Ops, spec: KVSpec) -> AttentionBackend:
        windows = (self._config.model.sliding_window,)
        backend = choose(self._config.attention_backend, ops, spec, self._device, windows)
        if backend.page_sizes and spec.block_size not in backend.page_sizes:
            sizes = ", ".join(map(str, backend.page_sizes))
            raise ConfigError(
                f"block_size={spec.block_size} does not work with attention backend {backend.name}; it takes: {sizes}"
            )
        return backend

    def _loaded(self) -> tuple[CausalLM, AttentionBackend]:
        if self._model is None or self._backend is None:
            raise RuntimeError("the worker has no model yet: load comes first")
        return self._model, self._backend

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the worker cannot run yet: load and initialize_kv_cache come first")
        return self._runner

    def _largest_step(self) -> tuple[int, int]:
        limits = self._config.scheduler
        return limits.max_num_batched_tokens, min(limits.max_num_seqs, limits.max_num_batched_tokens)

    def _make_runner(self, config: KVCacheConfig) -> tuple[KVMemory, ModelRunner]:
        model, backend = self._loaded()
        kv = KVMemory(config, allocate_kv_caches(config, backend, self._device))
        return kv, ModelRunner(self._config, model, backend, kv, self._device)


class _DeviceBudget:
    """A CUDA device's memory as this engine found it, and its share."""

    def __init__(self, memory_fraction: float) -> None:
        self._free_at_start, total = torch.cuda.mem_get_info()
        self._requested = requested_bytes(memory_fraction, total_bytes=total, free_bytes=self._free_at_start)

    def left_bytes(self) -> int:
        """What torch holds in reserve after the largest step counts as used: the next such step needs it again."""
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        return max(0, self._requested - (self._free_at_start - free))


def allocate_kv_caches(config: KVCacheConfig, backend: AttentionBackend, device: torch.device) -> dict[str, Tensor]:
    """Raw bytes per layer, viewed as `backend` wants them; undefined, since nothing is read before it is stored."""
    caches = {}
    for group in config.groups:
        shape = backend.kv_cache_shape(config.num_blocks, group.spec)
        for name in group.layer_names:
            raw = torch.empty(config.num_blocks * group.spec.page_bytes, dtype=torch.uint8, device=device)
            caches[name] = raw.view(getattr(torch, group.spec.dtype)).view(shape)
    return caches


def _only(specs: dict[str, KVSpec]) -> KVSpec:
    kinds = set(specs.values())
    if len(kinds) != 1:
        raise NotSupported(f"a model must keep one kind of KV cache in all its layers, this one keeps {len(kinds)}")
    return kinds.pop()
