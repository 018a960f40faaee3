"""What attention layers need during one forward pass and a model's `forward` does not pass down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from inferd.engine.attention.base import AttentionBackend, Metadata


class LayerContext(NamedTuple):
    """One layer's part of the step."""

    kv_cache: Tensor  # as `AttentionBackend.kv_cache_shape` views it
    slots: Tensor  # [t] i64
    metadata: Metadata


@dataclass(frozen=True)
class ForwardContext:
    """The step's attention state; KV groups are numbered as in `KVCacheConfig.groups`."""

    backend: AttentionBackend
    metadata: dict[int, Metadata]  # by KV group
    slots: dict[int, Tensor]  # by KV group
    kv_caches: dict[str, Tensor]  # by layer name
    groups: dict[str, int]  # layer name -> KV group
    whole: Metadata | None = None  # of layers that see each row whole and keep nothing

    def layer(self, name: str) -> LayerContext:
        """Raises KeyError for a layer that has no KV cache."""
        group = self.groups[name]
        return LayerContext(self.kv_caches[name], self.slots[group], self.metadata[group])


_current: ContextVar[ForwardContext | None] = ContextVar(
    "forward_context", default=None
)  # per thread: engines may share a process


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` current for this thread inside the block; one forward pass inside another is an error."""
    if _current.get() is not None:
        raise RuntimeError("forward_context is already active: one forward pass cannot start inside another")
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> ForwardContext:
    """The active context; raises RuntimeError outside of `forward_context`."""
    context = _current.get()
    if context is None:
        raise RuntimeError("an attention layer ran outside of forward_context(...): there is no KV cache to attend to")
    return context
