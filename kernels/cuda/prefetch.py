"""What a kernel may do before the kernel ahead of it has finished: fetch into the L2 what it will read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers):
    """One 128-byte line for each pointer. The L2 is coherent, so memory that is still being written does no harm."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
