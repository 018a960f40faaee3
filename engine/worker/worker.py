"""One rank: its device, its model, its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from inferd.engine.attention.base import AttentionBackend
from inferd.engine.attention.select import choose
from inferd.engine.config import CUDAGraphMode, EngineConfig
from inferd.engine.core.kv.plan import group_layers
from inferd.engine.core.kv.spec import EncoderOnlySpec, KVCacheConfig, KVSpec
from inferd.engine.core.output import ModelRunnerOutput, SchedulerOutput
from inferd.engine.errors import ConfigError
from inferd.engine.layers.parallel import TensorParallel
from inferd.engine.layers.target import TORCH_DTYPES
from inferd.engine.loader.base import CheckpointTensors, load_model, load_pooling_model
from inferd.engine.lora.forward import LoraForward
from inferd.engine.lora.manager import WorkerAdapters
from inferd.engine.messages import KV_CACHE, WEIGHTS, MemoryRecord
from inferd.engine.models.base import CausalLM, Model, PoolingModel
from inferd.engine.pooling.forward import PoolingForward
from inferd.engine.pooling.runner import PoolingRunner
from inferd.engine.spec.drafting import Drafting
from inferd.engine.spec.rank import RankSpeculation
from inferd.engine.worker.forward import EagerForward, Forward, KVMemory
from inferd.engine.worker.graphs import CudaRecorder, GraphForward, can_capture, capture_sizes
from inferd.engine.worker.host_memory import resident_bytes
from inferd.engine.worker.inputs import dummy_layout
from inferd.engine.worker.memory import DeviceBudget, MemoryProbe, cpu_kv_bytes, largest_step_bytes, without_positions
from inferd.engine.worker.parallel_state import ParallelState
from inferd.engine.worker.pools import Arena, FixedArena, Pools, Restored
from inferd.engine.worker.probe import read_card, read_host
from inferd.engine.worker.runner import ModelRunner
from inferd.engine.worker.weights import LoadedWeights
from inferd.kernels.common.ops import KernelUnavailable, Ops
from inferd.kernels.select import build_greedy, build_ops

logger = logging.getLogger(__name__)

CPU_WARM_UP = (64, 4)  # tokens and rows: nothing is captured there, and a full budget would take seconds
# Query tokens of one row: kernels are compiled for classes of them, and for contexts so long that they are divided.
CUDA_WARM_UP = (4096, 1024, 64, 16, 8, 4)


class Worker:
    """`load`, then `initialize_kv_cache`, then `warm_up`, then steps; out of this order raises RuntimeError."""

    def __init__(
        self, config: EngineConfig, parallel: ParallelState | None = None, probe: MemoryProbe | None = None
    ) -> None:
        """`parallel`: the other ranks, when there are any. `probe`: reads the device's memory, this machine's where not
        given. Raises ConfigError when the device's memory is not there to take."""
        self._config = config
        self._tp = TensorParallel.over((parallel or ParallelState.alone()).tp)
        self._device = rank_device(config, self._tp.rank)
        torch.set_num_threads(config.num_threads)
        is_cuda = config.device == "cuda"
        self._probe = probe or (partial(read_card, self._device) if is_cuda else read_host)
        self._budget = DeviceBudget(config.cache.memory_fraction, self._probe) if is_cuda else None
        self._pools = Pools(self._device)
        self._weights: LoadedWeights[Model] | None = None
        self._model: Model | None = None
        self._backend: AttentionBackend | None = None
        self._kv: KVMemory | None = None
        self._adapters = WorkerAdapters.make(config, self._device)
        self._eager: EagerForward | PoolingForward | None = None
        self._runner: ModelRunner | PoolingRunner | None = None
        self.speculation = RankSpeculation()
        self._captures = False
        self._graphs: GraphForward | None = None
        self._graphs_bytes = 0
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
        if self._weights is not None:
            raise RuntimeError("the worker was asked to load a second time")
        ops = self._build_ops()  # kept over a sleep, so that the same kernels run afterwards
        self._weights = LoadedWeights(self._config, self._device, partial(self._load_model, ops), self._take_model)
        self._pools.add(self._weights)
        self._backend = self._choose_backend(ops, self.kv_specs())
        self.speculation = RankSpeculation.load(
            self._config, self._tp.rank, ops, self._device, self._pools, self.kv_specs()
        )
        self._decisions += [*ops.decisions, f"attention: {self._backend.name}", *self.speculation.decisions]
        self._captures = self._settle_graphs(self._backend)
        if self._adapters is not None:
            self._decisions.append(self._adapters.decision(captures=self._captures))

    def kv_specs(self) -> dict[str, KVSpec]:
        if self._model is None:
            raise RuntimeError("the worker has no model yet: load comes first")
        return self._model.kv_specs(self._config.cache.block_size)

    def available_kv_bytes(self) -> int:
        """`kv_cache_bytes` where given, else what memory allows; measured with the largest step on an accelerator."""
        specs, share = self.kv_specs(), self.speculation.kv_share
        if not group_layers(specs):
            return 0  # this model keeps nothing
        if self._config.cache.kv_cache_bytes is not None:
            return int(self._config.cache.kv_cache_bytes * share)
        if self._budget is None:
            return cpu_kv_bytes(self._config, specs, int(self._probe().free_bytes * share))
        largest = self._largest_step()
        self._loaded()[0].reserve_positions(min(largest[0], self._config.scheduler.max_model_len))
        kv = self._allocate_kv(KVCacheConfig(1, group_layers(specs)), FixedArena(KV_CACHE, self._device))
        eager = self._make_eager(kv)
        graph_bytes = self._make_graphs(eager).estimate_bytes() if self._captures else 0
        torch.cuda.empty_cache()
        runner = self._make_runner(eager, kv)
        runner.dummy_run(*largest)
        self._warm_up_adapters(runner, largest[0])
        self.speculation.dummy_run(*largest)
        left = int((self._budget.left_bytes() - graph_bytes) * share)
        return max(0, without_positions(self._config, specs, left))

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        model, _ = self._loaded()
        if self._runner is not None:
            raise RuntimeError("the worker's KV cache was initialised already")
        if config.max_model_len is not None:
            limits = replace(self._config.scheduler, max_model_len=config.max_model_len)
            self._config = replace(self._config, scheduler=limits)
        model.reserve_positions(self._config.scheduler.max_model_len)
        self._kv = self._allocate_kv(config, self._pools.make_arena(KV_CACHE))
        self._eager = self._make_eager(self._kv)
        self._graphs = self._make_graphs(self._eager) if self._captures else None
        drafting = self.speculation.make_drafting(config.num_blocks, self._config.scheduler.max_model_len)
        self._runner = self._make_runner(self._graphs or self._eager, self._kv, drafting)
        num_bytes = config.num_blocks * config.block_bytes
        logger.info("KV cache: %d blocks, %.2f GiB", config.num_blocks, num_bytes / 2**30)

    def warm_up(self) -> None:
        """The largest step first, then some that take other kernels; keeps nothing and stores nothing."""
        runner = self.runner
        num_tokens, num_rows = self._largest_step()
        if self._config.device == "cpu":
            num_tokens, num_rows = min(num_tokens, CPU_WARM_UP[0]), min(num_rows, CPU_WARM_UP[1])
        runner.dummy_run(num_tokens, num_rows)
        self.speculation.dummy_run(num_tokens, num_rows)
        if self._config.device != "cpu":
            self._compile_prefill(runner.forward, runner.block_sizes)
        self._warm_up_adapters(runner, num_tokens)
        runner.dummy_run(1, 1)
        if self._graphs is not None:
            captured = self._graphs.capture()
            self._graphs_bytes = captured.num_bytes
            self._decisions.append(str(captured))

    @torch.inference_mode()
    def _compile_prefill(self, forward: Forward | PoolingForward, block_sizes: Sequence[int]) -> None:
        limits = self._config.scheduler
        longest = min(limits.max_num_batched_tokens, limits.max_model_len)
        for length in CUDA_WARM_UP:
            if length < longest:
                for context in (0, limits.max_model_len - length):
                    forward.run(dummy_layout([length], block_sizes, context))

    @torch.inference_mode()
    def _warm_up_adapters(self, runner: ModelRunner | PoolingRunner, num_tokens: int) -> None:
        """One row of that many tokens, or of as many as fit a context; then one of a single token."""
        if isinstance(runner.forward, LoraForward):
            longest = CPU_WARM_UP[0] if self._config.device == "cpu" else self._config.scheduler.max_model_len
            for length in (min(num_tokens, longest), 1):
                runner.forward.warm_up(dummy_layout([length], runner.block_sizes))

    def load_lora(self, adapter_id: int, path: str) -> str:
        """See `AdapterWorkers`; for an engine that has adapters."""
        return self._own_adapters().load(adapter_id, path)

    def unload_lora(self, adapter_id: int) -> None:
        self._own_adapters().unload(adapter_id)

    def _own_adapters(self) -> WorkerAdapters:
        if self._adapters is None:
            raise RuntimeError("the worker was asked about adapters, and is set up without")
        return self._adapters

    def execute_model(self, output: SchedulerOutput) -> None:
        if output.num_scheduled_tokens:
            self._pools.check()
        self.runner.execute(output)

    def sample_tokens(self, bitmask: Any | None = None) -> ModelRunnerOutput:
        return self.runner.sample(bitmask)

    def sleep_refusal(self) -> str | None:
        return self._pools.refusal

    def sleep(self, level: int) -> dict[str, int]:
        """See `Executor.sleep`. Bytes given back, by tag."""
        return self._pools.release(level)

    def wake(self, tags: Sequence[str]) -> dict[str, Restored]:
        """See `Executor.wake`. Bytes and seconds, by tag."""
        return self._pools.restore(tags)

    def memory(self) -> MemoryRecord:
        weights, kv, graphs = self._pools.num_bytes(WEIGHTS), self._pools.num_bytes(KV_CACHE), self._graphs_bytes
        if self._budget is None:
            resident, workspace = resident_bytes(), largest_step_bytes(self._config) if weights else 0
        else:
            resident = self._budget.taken_bytes()
            workspace = max(0, resident - weights - kv - graphs)
        return MemoryRecord(self._tp.rank, weights, kv, graphs, workspace, self._pools.kept_bytes, resident)

    def shutdown(self) -> None:
        """Let go of the model and its memory. Idempotent."""
        if self._weights is not None:
            self._weights.close()
        self.speculation.close()
        self._model = self._backend = self._kv = self._eager = self._runner = self._graphs = None

    def _load_model(self, ops: Ops, tensors: CheckpointTensors | None) -> Model:
        load = load_model if self._config.pooler is None else load_pooling_model
        model = load(self._config, ops, self._device, tp=self._tp, tensors=tensors)
        if self._adapters is not None:
            self._adapters.attach(model)
        return model

    def _take_model(self, model: Any) -> None:
        """None: let go of it."""
        self._model = model
        if model is None and self._adapters is not None:
            self._adapters.detach()
        if model is not None and self._kv is not None:
            model.reserve_positions(self._config.scheduler.max_model_len)
        if self._eager is not None:
            self._eager.take_model(model)

    def _build_ops(self) -> Ops:
        try:
            return build_ops(self._device, TORCH_DTYPES[self._config.dtype], self._config.kernels)
        except KernelUnavailable as error:
            raise ConfigError(str(error)) from error

    def _choose_backend(self, ops: Ops, specs: Mapping[str, KVSpec]) -> AttentionBackend:
        """Pages have the lengths here that the plan will give them."""
        kinds = list(dict.fromkeys(group.spec for group in group_layers(specs)))
        without_pages = [spec for spec in dict.fromkeys(specs.values()) if isinstance(spec, EncoderOnlySpec)]
        softcap = self._config.model.attention_softcap
        backend = choose(self._config.attention_backend, ops, [*kinds, *without_pages], self._device, softcap)
        for block_size in (spec.block_size for spec in kinds):
            if backend.page_sizes and block_size not in backend.page_sizes:
                sizes = ", ".join(map(str, backend.page_sizes))
                raise ConfigError(
                    f"block_size={block_size} does not work with attention backend {backend.name}; it takes: {sizes}"
                )
        return backend

    def _loaded(self) -> tuple[Model, AttentionBackend]:
        if self._model is None or self._backend is None:
            raise RuntimeError("the worker has no model yet: load comes first")
        return self._model, self._backend

    @property
    def runner(self) -> ModelRunner | PoolingRunner:
        if self._runner is None:
            raise RuntimeError("the worker cannot run yet: load and initialize_kv_cache come first")
        return self._runner

    def _largest_step(self) -> tuple[int, int]:
        limits = self._config.scheduler
        return limits.max_num_batched_tokens, min(limits.max_num_seqs, limits.max_num_batched_tokens)

    def _settle_graphs(self, backend: AttentionBackend) -> bool:
        """Whether decode steps are captured; says what became of a mode that the backend does not serve whole."""
        mode = self._config.cudagraph_mode
        if mode == CUDAGraphMode.NONE:
            return False
        captures = can_capture(backend)
        settled = CUDAGraphMode.FULL_DECODE_ONLY if captures else CUDAGraphMode.NONE
        if settled != mode:
            what = "steps of one token a row only" if captures else "no step"
            logger.warning("cudagraph_mode=%s instead of %s: %s can capture %s", settled, mode, backend.name, what)
            self._decisions.append(f"cudagraph_mode={settled} instead of {mode}: {backend.name} can capture {what}")
        return captures

    def _allocate_kv(self, config: KVCacheConfig, arena: Arena) -> KVMemory:
        return KVMemory(config, allocate_kv_caches(config, self._loaded()[1], arena.empty))

    def _make_eager(self, kv: KVMemory) -> EagerForward | PoolingForward:
        model, backend = self._loaded()
        if self._config.pooler is not None:
            return PoolingForward(cast(PoolingModel, model), backend, kv, self._device)
        return EagerForward(cast(CausalLM, model), backend, kv, self._device)

    def _make_graphs(self, eager: EagerForward | PoolingForward) -> GraphForward:
        assert isinstance(eager, EagerForward), "only steps of a model that generates are captured"
        limits = self._config.scheduler
        model = self._config.model
        has_full = any(model.window_of(layer) is None for layer in range(model.num_layers))
        share = limits.share_prefix_attention and has_full
        adapters = self._adapters if self._adapters is not None and self._adapters.can_be_captured else None
        sizes = capture_sizes(self._largest_step()[1], share=share, lora=adapters is not None)
        greedy = build_greedy(self._device, self._config.kernels)
        recorder = CudaRecorder(self._device)
        return GraphForward(eager, greedy, sizes, limits.max_model_len, recorder, self._device, adapters)

    def _make_runner(
        self, forward: Forward | PoolingForward, kv: KVMemory, drafting: Drafting | None = None
    ) -> ModelRunner | PoolingRunner:
        if isinstance(forward, PoolingForward):
            return PoolingRunner(self._config, forward, kv.block_sizes)
        if self._adapters is not None and isinstance(forward, EagerForward | GraphForward):
            forward = LoraForward(forward, self._adapters)
        return ModelRunner(self._config, forward, kv.block_sizes, self._device, self._tp, drafting)


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Ranks share main memory; each has a card of its own."""
    num_ranks = config.parallel.tensor_parallel_size
    return torch.device("cuda", rank) if config.device == "cuda" and num_ranks > 1 else torch.device(config.device)


def allocate_kv_caches(
    config: KVCacheConfig, backend: AttentionBackend, empty: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    """Each layer's view of the raw bytes that it shares with layers of other groups, as `backend` wants it. `empty`
    gives raw bytes of some number.

    Undefined content, since nothing is read before it is stored.
    """
    specs = {name: group.spec for group in config.groups for name in group.layer_names}
    page_bytes = max((spec.page_bytes for spec in specs.values()), default=0)
    caches = {}
    for names in config.tensors:
        raw = empty(config.num_blocks * page_bytes)
        for name in names:
            shape = backend.kv_cache_shape(config.num_blocks, specs[name])
            caches[name] = raw.view(TORCH_DTYPES[specs[name].dtype]).view(shape)
    return caches
