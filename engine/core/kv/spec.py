"""What a layer keeps per token, and how memory is laid out for it. Frozen values, no tensors.

KV memory is raw bytes that a layer's attention backend views through its spec; so layers of different kinds share one
allocation, and other kinds (latent attention, recurrent state, fp8) need no new allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from inferd.engine.config import Dtype

DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVSpec:
    """Full attention: a key and a value of `num_kv_heads * head_size` elements per token, kept to the end."""

    block_size: int  # tokens per block (page)
    num_kv_heads: int
    head_size: int
    dtype: Dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` holds at any time, when no step computes more of it than
        `max_step_tokens`."""
        return self.num_blocks(num_tokens)


@dataclass(frozen=True)
class SlidingWindowSpec(KVSpec):
    """A query at position p sees the keys at (p - window, p]; what lies before is given back as the window moves."""

    window: int

    @property
    def num_window_blocks(self) -> int:
        """Blocks before a block's first token that this token still looks into."""
        return self.num_blocks(self.window - 1)

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """The window's and the step's tokens may begin anywhere within a block, hence one block more."""
        return min(self.num_blocks(num_tokens), self.num_blocks(self.window - 1 + max_step_tokens) + 1)


@dataclass(frozen=True)
class EncoderOnlySpec(KVSpec):
    """Each token sees all of its request, which is computed in one step: nothing is kept, and no block is taken."""

    @property
    def token_bytes(self) -> int:
        return 0

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return 0


def window_of(spec: KVSpec) -> int | None:
    return spec.window if isinstance(spec, SlidingWindowSpec) else None


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: KVSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """`num_blocks` counts the null block 0. A block is one page in every tensor; all pages have the same bytes.

    Groups of full attention come first. A model that keeps nothing has no group, and the null block alone.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    max_model_len: int | None = None  # the longest context, where it was left to what fits

    @property
    def tensors(self) -> tuple[tuple[str, ...], ...]:
        """Layer names by the memory that they share: at most one layer of each group, because a block belongs to one
        group at a time."""
        columns = zip_longest(*(group.layer_names for group in self.groups))
        return tuple(tuple(name for name in column if name is not None) for column in columns)

    @property
    def block_bytes(self) -> int:
        """Of one block in all tensors."""
        return max((group.spec.page_bytes for group in self.groups), default=0) * len(self.tensors)
