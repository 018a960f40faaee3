"""What a layer keeps per token, and how memory is laid out for it. Frozen values, no tensors.

KV memory is raw bytes that a layer's attention backend views through its spec; so other kinds (latent attention,
recurrent state, fp8) need no new allocator.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: KVSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """`num_blocks` counts the null block 0. Every layer of every group holds `num_blocks` pages."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
