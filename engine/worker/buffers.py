"""The memory that a captured step reads its inputs from: filled on the host, moved in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferd.engine.attention.base import StaticGeometry, StaticPrefixes
from inferd.engine.upload import place, torch_dtype, window
from inferd.engine.worker.inputs import StepLayout, empty_layout
from inferd.kernels.lora.rows import NO_SLOT, HostRows, max_tiles

MAX_SHARED_GROUPS = 8  # prefixes of one step that are attended once
_NUM_STAGES = 2  # pinned copies in flight

Array = TypeVar("Array")
SharedTokens = tuple[int, list[int]]  # length in tokens, and the rows that share them
Field = tuple[np.dtype[Any], tuple[int, ...]]

_I32, _I64 = np.dtype("int32"), np.dtype("int64")


@dataclass(frozen=True)
class DecodeInputs(Generic[Array]):
    """Inputs of a step of `size` rows with one token each, some of them padding."""

    token_ids: Array  # [size] i64
    positions: Array  # [size] i64
    seq_lens: Array  # [size] i32, 0 for padding
    slots: tuple[Array, ...]  # [size] i64 per KV group, -1 for padding
    prefix_lens: Array  # [MAX_SHARED_GROUPS] i32, in tokens
    prefix_starts: Array  # [MAX_SHARED_GROUPS + 1] i32
    prefix_rows: Array  # [size] i32
    row_group: Array  # [size] i32, -1 for a row that shares nothing
    lora_rows: Array  # [size] i64, see `LoraRows`; nothing where there are no adapters
    lora_tiles: Array  # [tiles, 4] i32, NO_SLOT first for padding
    block_tables: tuple[Array, ...]  # [size, columns] i32 per KV group

    @classmethod
    def of(cls, parts: Mapping[str, Array]) -> DecodeInputs[Array]:
        """From parts that are named as in `decode_fields`."""
        groups = range(sum(name.startswith("slots") for name in parts))
        single = {name: part for name, part in parts.items() if name in cls.__dataclass_fields__}
        slots = tuple(parts[f"slots.{group}"] for group in groups)
        return cls(**single, slots=slots, block_tables=tuple(parts[f"block_table.{group}"] for group in groups))


def decode_fields(size: int, table_widths: Sequence[int], num_adapters: int = 0) -> dict[str, Field]:
    """Dtype and shape of each input, in order of their places; `table_widths` has a number of columns per KV group."""
    lora_size = size if num_adapters else 0
    return {
        "token_ids": (_I64, (size,)),
        "positions": (_I64, (size,)),
        "seq_lens": (_I32, (size,)),
        **{f"slots.{group}": (_I64, (size,)) for group in range(len(table_widths))},
        "prefix_lens": (_I32, (MAX_SHARED_GROUPS,)),
        "prefix_starts": (_I32, (MAX_SHARED_GROUPS + 1,)),
        "prefix_rows": (_I32, (size,)),
        "row_group": (_I32, (size,)),
        "lora_rows": (_I64, (lora_size,)),
        "lora_tiles": (_I32, (max_tiles(lora_size, num_adapters), 4)),
        **{f"block_table.{group}": (_I32, (size, width)) for group, width in enumerate(table_widths)},
    }


def static_geometries(inputs: DecodeInputs[Tensor], max_seq_len: int, *, shared: bool) -> list[StaticGeometry]:
    """One per KV group; only with `shared` do they name prefixes."""
    prefixes = None
    if shared:
        tensors = (inputs.prefix_lens, inputs.prefix_starts, inputs.prefix_rows, inputs.row_group)
        prefixes = StaticPrefixes(*tensors, max_len=max_seq_len)
    return [
        StaticGeometry(table, inputs.seq_lens, slots, inputs.positions, max_seq_len, prefixes)
        for table, slots in zip(inputs.block_tables, inputs.slots, strict=True)
    ]


def fill(
    arrays: DecodeInputs[NDArray[Any]], step: StepLayout, shared: Sequence[SharedTokens], lora: HostRows | None = None
) -> None:
    """Write a decode step of n <= size rows; what lies behind them becomes padding. `lora`: those with adapters."""
    count = len(step.seq_lens)
    for target, source, padding in (
        (arrays.token_ids, step.token_ids, 0),
        (arrays.positions, step.positions, 0),
        (arrays.seq_lens, step.seq_lens, 0),
        *((target, source, -1) for target, source in zip(arrays.slots, step.slots, strict=True)),
    ):
        target[:count] = source
        target[count:] = padding
    for table, columns in zip(arrays.block_tables, step.block_tables, strict=True):
        table[:count, : columns.shape[1]] = columns  # nothing beyond a row's length is ever read
    _fill_prefixes(arrays, shared)
    arrays.lora_tiles.fill(NO_SLOT)
    if lora is not None:
        arrays.lora_rows[: len(lora.rows)] = lora.rows
        arrays.lora_tiles[: len(lora.tiles)] = lora.tiles


def _fill_prefixes(arrays: DecodeInputs[NDArray[Any]], shared: Sequence[SharedTokens]) -> None:
    arrays.prefix_lens.fill(0)
    arrays.row_group.fill(-1)
    arrays.prefix_starts[0] = end = 0
    for group, (num_tokens, rows) in enumerate(shared):
        arrays.prefix_lens[group] = num_tokens
        arrays.row_group[rows] = group
        arrays.prefix_rows[end : end + len(rows)] = rows
        end += len(rows)
        arrays.prefix_starts[group + 1] = end
    arrays.prefix_starts[len(shared) + 1 :] = end


class DecodeBuffers:
    """One region on the device in which the inputs of every captured size begin, and host memory to fill it from.

    Each size has a layout of its own, so that a step copies what its size needs and no more.
    """

    def __init__(self, max_size: int, table_widths: Sequence[int], device: torch.device, num_adapters: int = 0) -> None:
        """`num_adapters`: the most of one step."""
        self._shape = tuple(table_widths), num_adapters
        num_bytes = _place(decode_fields(max_size, *self._shape))[1]
        self._region = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._stages = [_Stage(num_bytes, device) for _ in range(_NUM_STAGES)]

    def inputs(self, size: int) -> DecodeInputs[Tensor]:
        """Where a captured step of `size` rows reads: the same addresses at each call."""
        fields = decode_fields(size, *self._shape)
        offsets, _ = _place(fields)
        views = {}
        for (name, (dtype, shape)), offset in zip(fields.items(), offsets, strict=True):
            raw = self._region[offset : offset + prod(shape) * dtype.itemsize]
            views[name] = raw.view(torch_dtype(dtype)).view(shape)
        return DecodeInputs.of(views)

    def load(self, size: int, step: StepLayout, shared: Sequence[SharedTokens], lora: HostRows | None = None) -> None:
        """Bring a step into place, behind whatever the device is doing."""
        stage = self._stages[0]
        self._stages.reverse()
        stage.wait()
        arrays, num_bytes = stage.arrays(size, *self._shape)
        fill(arrays, step, shared, lora)
        self._region[:num_bytes].copy_(stage.memory[:num_bytes], non_blocking=True)
        stage.mark()

    def clear(self, size: int) -> None:
        """Nothing but padding."""
        self.load(size, empty_layout(len(self._shape[0])), [])


class _Stage:
    """Host memory that may be written again once the copy out of it has been made."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._arrays: dict[int, tuple[DecodeInputs[NDArray[Any]], int]] = {}

    def arrays(
        self, size: int, table_widths: Sequence[int], num_adapters: int
    ) -> tuple[DecodeInputs[NDArray[Any]], int]:
        """The inputs of `size` rows in this memory, and how many bytes they take."""
        if size not in self._arrays:
            fields = decode_fields(size, table_widths, num_adapters)
            offsets, num_bytes = _place(fields)
            memory = self.memory.numpy()
            parts = {
                name: window(memory, offset, shape, dtype)
                for (name, (dtype, shape)), offset in zip(fields.items(), offsets, strict=True)
            }
            self._arrays[size] = DecodeInputs.of(parts), num_bytes
        return self._arrays[size]

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self) -> None:
        if self._copied is not None:
            self._copied.record()


class HostIds:
    """Token ids from the device to the host: pinned memory, and the one wait of a step."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._memory = torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def take(self, token_ids: Tensor) -> NDArray[np.int64]:
        """token_ids[m] i64 -> a copy in main memory."""
        part = self._memory[: len(token_ids)]
        part.copy_(token_ids, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
            self._copied.synchronize()
        return np.array(part.numpy())


def _place(fields: dict[str, Field]) -> tuple[list[int], int]:
    return place([prod(shape) * dtype.itemsize for dtype, shape in fields.values()])
