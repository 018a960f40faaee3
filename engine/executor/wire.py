"""What an executor and its worker processes tell each other. Msgpack, no pickle."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from inferd.engine.config import EngineConfig
from inferd.engine.core.kv import spec as kv_spec
from inferd.engine.core.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from inferd.engine.executor.shm import Ring

OUTPUT_RANK = 0  # answers steps: all ranks have the same tokens, and its are the ones that count

EXECUTE, SAMPLE = "execute", "sample"  # the two calls of a step
STEP_CALLS = (EXECUTE, SAMPLE)  # when one of these fails, the workers no longer agree on what they hold

_ARRAY = 1  # the code of a numpy array among msgpack's extension types
_KIND = "$"  # the key under which a frozen value of `core.kv.spec` says its class
_SPECS = {name: kind for name, kind in vars(kv_spec).items() if isinstance(kind, type) and is_dataclass(kind)}


class WorkerStart(msgspec.Struct, forbid_unknown_fields=True):
    """All that a worker process is told at its start. The fds are inherited ones."""

    config: EngineConfig
    rank: int
    num_ranks: int
    steps: Ring  # from the executor, read by every worker
    replies: Ring  # to the executor
    store_fd: int  # an anonymous file through which the ranks find each other
    death_fd: int  # the read end of a pipe whose other end only the parent has
    parent_pid: int
    kernel_signal: bool  # the parent's main thread started it, see `die_with_parent`


class Execute(msgspec.Struct, tag=EXECUTE, array_like=True):
    """Answered by `Done` from the output rank."""

    number: int
    output: SchedulerOutput


class Sample(msgspec.Struct, tag=SAMPLE, array_like=True):
    """Answered by `Sampled` from the output rank."""

    number: int
    bitmask: GrammarBitmask | None = None


class RankCall(msgspec.Struct, tag="call", array_like=True):
    """One of the calls that `WorkerLoop` knows, by name. Every rank answers with `Done`."""

    number: int
    method: str
    args: list[Any] = []


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End in order; no answer but the end of the process."""


class Done(msgspec.Struct, tag="done", array_like=True):
    number: int
    value: Any = None


class Sampled(msgspec.Struct, tag="sampled", array_like=True):
    number: int
    output: ModelRunnerOutput


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """In place of any answer, and from every rank that it happened to. `code`: an `EngineError`'s, or "internal"."""

    number: int
    name: str  # of the call
    message: str
    code: str
    detail: str  # traceback, for the log


ToWorker = Execute | Sample | RankCall | Stop
FromWorker = Done | Sampled | Failed


def pack(value: Any) -> Any:
    """Makes a call's arguments or result plain: KV specs and plans become mappings that `unpack` turns back."""
    if type(value).__name__ in _SPECS and is_dataclass(value):
        return {_KIND: type(value).__name__} | {f.name: pack(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack(item) for item in value]
    return value


def unpack(value: Any) -> Any:
    """Sequences inside a frozen value come back as tuples, as they are there, and as lists elsewhere."""
    if isinstance(value, dict):
        items = {key: unpack(item) for key, item in value.items() if key != _KIND}
        if _KIND not in value:
            return items
        frozen = {key: tuple(item) if isinstance(item, list) else item for key, item in items.items()}
        return _SPECS[value[_KIND]](**frozen)
    if isinstance(value, list):
        return [unpack(item) for item in value]
    return value


def encode_start(start: WorkerStart) -> bytes:
    return msgspec.json.encode(start, enc_hook=_plain)


def decode_start(data: bytes) -> WorkerStart:
    return msgspec.json.decode(data, type=WorkerStart, dec_hook=_typed)


def make_encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_plain)


def to_worker_decoder() -> msgspec.msgpack.Decoder[ToWorker]:
    return msgspec.msgpack.Decoder(ToWorker, ext_hook=_extension)


def from_worker_decoder() -> msgspec.msgpack.Decoder[FromWorker]:
    return msgspec.msgpack.Decoder(FromWorker, ext_hook=_extension)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray):
        parts = (value.dtype.str, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(parts))
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to a worker")


def _typed(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be read from a message")


def _extension(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"a message holds an unknown extension type {code}")
    dtype, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytearray])
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
