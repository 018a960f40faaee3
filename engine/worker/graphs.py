"""Decode steps captured once per number of rows and replayed: one launch in place of hundreds.

A step is replayed when each of its rows has one token; others run eagerly. Its rows are padded to the next captured
size. Steps whose rows share prefixes have graphs of their own, since attending a prefix once takes further launches.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inferd.engine.attention.base import AttentionBackend, StaticGeometry
from inferd.engine.core.output import GraphUse
from inferd.engine.worker.buffers import MAX_SHARED_GROUPS, DecodeBuffers, SharedTokens, static_geometries
from inferd.engine.worker.forward import EagerForward, StepLogits
from inferd.engine.worker.inputs import SharedRows, StepLayout
from inferd.kernels.lora.rows import HostRows

logger = logging.getLogger(__name__)

# Below this many tokens that need not be read again, a shared prefix costs more in launches than it saves.
MIN_SAVED_TOKENS = 4096

_STEP = 8  # between captured sizes from here on
_SHARED_SIZES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


class Key(NamedTuple):
    """Names a captured step."""

    size: int  # rows, padding included
    shared: bool
    lora: bool = False  # its rows may have adapters

    @property
    def mode(self) -> str:
        return "decode_lora" if self.lora else "decode_shared" if self.shared else "decode"


@dataclass(frozen=True)
class Sizes:
    """Which steps are captured; ascending."""

    plain: tuple[int, ...]
    shared: tuple[int, ...]
    has_lora: bool = False  # each plain one a second time

    @property
    def keys(self) -> list[Key]:
        """In order of capture: the largest first, so that the others find room in the memory that it left."""
        keys = [Key(size, False) for size in self.plain] + [Key(size, True) for size in self.shared]
        if self.has_lora:
            keys += [Key(size, False, True) for size in self.plain]
        return sorted(keys, reverse=True)

    def choose(self, num_rows: int, *, shared: bool) -> Key | None:
        """The smallest captured step with room; None when there is none. Sharing is given up where only that is."""
        sizes = self.shared if shared else self.plain
        at = bisect_left(sizes, num_rows)
        if at < len(sizes):
            return Key(sizes[at], shared)
        return self.choose(num_rows, shared=False) if shared else None


def capture_sizes(max_num_seqs: int, *, share: bool, lora: bool = False) -> Sizes:
    """1, 2, 4, then every eighth up to `max_num_seqs`, which is one of them; few where prefixes are shared."""
    plain = {1, 2, 4, *range(_STEP, max_num_seqs, _STEP), max_num_seqs}
    shared = {*_SHARED_SIZES, max_num_seqs} if share else set()
    return Sizes(_up_to(plain, 1, max_num_seqs), _up_to(shared, 2, max_num_seqs), lora)


def _up_to(sizes: Iterable[int], least: int, most: int) -> tuple[int, ...]:
    return tuple(sorted(size for size in sizes if least <= size <= most))


def worthwhile(prefixes: Sequence[SharedRows], block_size: int) -> list[SharedTokens]:
    """The prefixes that are worth attending once: those that save most, if there are more than have room."""
    groups = [(num_blocks * block_size, rows) for num_blocks, rows in prefixes]
    groups = [(tokens, rows) for tokens, rows in groups if (len(rows) - 1) * tokens >= MIN_SAVED_TOKENS]
    if len(groups) > MAX_SHARED_GROUPS:
        groups.sort(key=lambda group: (len(group[1]) - 1) * group[0], reverse=True)
    return groups[:MAX_SHARED_GROUPS]


Launch = Callable[[], StepLogits]


class CapturedAdapters(Protocol):
    """What layers add to rows with adapters, where which rows that are is known only when a step is replayed."""

    @property
    def num_slots(self) -> int: ...

    def applied_later(self, rows: Tensor, tiles: Tensor) -> AbstractContextManager[None]: ...


class Recorder(Protocol):
    """Makes a replay of a launch. Whatever the launch reads must keep its address."""

    def record(self, launch: Launch) -> Launch:
        """What the replay returns is good until the next one, of any recording."""
        ...

    def used_bytes(self) -> int:
        """Of the device's memory, by whatever is on it."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory: one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, launch: Launch) -> Launch:
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            launch()  # compiles kernels and gives libraries their workspaces, neither of which can be captured
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                captured = launch()
            finally:
                graph.capture_end()
        logits = _unowned(captured.logits)
        greedy_ids = None if captured.greedy_ids is None else _unowned(captured.greedy_ids)
        result = StepLogits(logits, greedy_ids)

        def replay() -> StepLogits:
            graph.replay()
            return result

        return replay

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class _Memory:
    """A tensor's address and form, for `torch.as_tensor`."""

    def __init__(self, tensor: Tensor) -> None:
        typestr = {torch.float32: "<f4", torch.int64: "<i8"}[tensor.dtype]
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "version": 3,
        }


def _unowned(tensor: Tensor) -> Tensor:
    """The same memory, but not kept from use by the graphs captured later: the pool stays as large as the largest."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device)


@dataclass(frozen=True)
class Captured:
    """What capturing cost."""

    num_graphs: int
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        return f"CUDA graphs: {self.num_graphs} captured in {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"


def can_capture(backend: AttentionBackend) -> bool:
    """Whether steps of one token a row can be captured with it."""
    lane, slot = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return backend.graph_metadata(StaticGeometry(lane[None], lane, slot, slot, max_seq_len=1)) is not None


class GraphForward:
    """Replays decode steps that fit a captured size, and leaves everything else to its eager twin."""

    def __init__(
        self,
        eager: EagerForward,
        greedy: Callable[[Tensor], Tensor],
        sizes: Sizes,
        max_model_len: int,
        recorder: Recorder,
        device: torch.device,
        adapters: CapturedAdapters | None = None,
    ) -> None:
        """`greedy`: as `kernels.select.build_greedy` gives it. `adapters`: of an engine that has them."""
        block_sizes = eager.kv.block_sizes
        widths = [-(-max_model_len // block_size) for block_size in block_sizes]
        self.eager = eager
        self._greedy = greedy
        self._sizes = sizes
        self._max_model_len = max_model_len
        self._prefix_block_size = block_sizes[0]
        self._recorder = recorder
        self._adapters = adapters
        self._buffers = DecodeBuffers(max(sizes.plain), widths, device, adapters.num_slots if adapters else 0)
        self._replays: dict[Key, Launch] = {}

    def run(self, step: StepLayout) -> StepLogits | None:
        if not step.is_decode:
            return self.eager.run(step)
        shared = worthwhile(step.shared_prefixes, self._prefix_block_size) if step.shared_prefixes else []
        key = self._sizes.choose(len(step.seq_lens), shared=bool(shared))
        if key is None or key not in self._replays:
            return self.eager.run(step)
        self._buffers.load(key.size, step, shared if key.shared else [])
        return _select(self._replays[key](), step, GraphUse(key.mode, key.size))

    def find_lora(self, step: StepLayout) -> Key | None:
        """The captured step for one whose rows have adapters; None when it has to run eagerly.

        Shared prefixes are not attended once there: rows with different adapters have none.
        """
        key = self._sizes.choose(len(step.seq_lens), shared=False) if step.is_decode else None
        key = key and key._replace(lora=True)
        return key if key in self._replays else None

    def replay_lora(self, key: Key, step: StepLayout, lora: HostRows) -> StepLogits | None:
        """`key`: as `find_lora` gave it. `lora`: the rows with adapters, in small tiles."""
        self._buffers.load(key.size, step, [], lora)
        return _select(self._replays[key](), step, GraphUse(key.mode, key.size))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.eager.compute_logits(hidden)

    @torch.inference_mode()
    def capture(self) -> Captured:
        """Every size. Stores nothing: the rows of a captured step are padding while it is recorded."""
        began, used = time.perf_counter(), self._recorder.used_bytes()
        gc.collect()
        for key in self._sizes.keys:
            self._record(key)
        captured = Captured(len(self._replays), time.perf_counter() - began, max(0, self._recorder.used_bytes() - used))
        logger.info("%s; rows: %s", captured, self._sizes)
        return captured

    @torch.inference_mode()
    def estimate_bytes(self) -> int:
        """What `capture` will take, from the first few graphs; keeps none of them."""
        keys = self._sizes.keys
        probes = list(dict.fromkeys([*keys[:2], *keys[-2:]]))
        used = [self._recorder.used_bytes()]
        for key in probes:
            self._record(key)
            used.append(self._recorder.used_bytes())
        self._replays.clear()
        gc.collect()
        growth = [max(0, after - before) for before, after in pairwise(used)]
        return sum(growth) + max(growth[len(growth) // 2 :]) * (len(keys) - len(probes))

    def _record(self, key: Key) -> None:
        inputs = self._buffers.inputs(key.size)
        backend, forward, choose = self.eager.backend, self.eager.launch, self._greedy
        geometries = static_geometries(inputs, self._max_model_len, shared=key.shared)
        metadata = {group: backend.graph_metadata(geometry) for group, geometry in enumerate(geometries)}
        context = self.eager.context(metadata, dict(enumerate(inputs.slots)))
        adapters = self._adapters if key.lora else None

        def launch() -> StepLogits:
            with nullcontext() if adapters is None else adapters.applied_later(inputs.lora_rows, inputs.lora_tiles):
                logits = forward(inputs.token_ids, inputs.positions, context)
            return StepLogits(logits, choose(logits))

        self._buffers.clear(key.size)
        self._replays[key] = self._recorder.record(launch)


def _select(result: StepLogits, step: StepLayout, graph: GraphUse) -> StepLogits | None:
    """The rows that have caught up, without the padding."""
    count = len(step.logits_indices)
    if not count:
        return None
    rows: slice | Tensor = slice(count)
    if count < len(step.seq_lens):
        rows = torch.from_numpy(step.logits_indices).to(result.logits.device)
    return StepLogits(result.logits[rows], None if result.greedy_ids is None else result.greedy_ids[rows], graph)
