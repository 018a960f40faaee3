"""`Ops` of the C kernels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from inferd.kernels.common.ops import KernelUnavailable, Linear, Ops
from inferd.kernels.cpu.build import load_library
from inferd.kernels.cpu.native import NativeKernels, accepts_linear
from inferd.kernels.linear import reference as linear


def native_ops(cache_dir: Path, *, strict: bool) -> Ops:
    """Own kernels for bfloat16 on this processor, compiled into `cache_dir`.

    A weight that they cannot serve goes through torch, or is an error when `strict`. Raises KernelUnavailable.
    """
    threads = torch.get_num_threads()
    kernels = NativeKernels(load_library(cache_dir), threads)

    def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
        if reason := accepts_linear(weight, bias):
            if strict:
                raise KernelUnavailable(f"kernels='native' cannot serve {reason}; choose kernels='auto'")
            return linear.make_linear(weight, bias)
        return kernels.linear(weight, bias)

    def make_logits(weight: Tensor) -> Linear:
        if accepts_linear(weight, None):
            return linear.make_logits(weight)
        return kernels.linear(weight, None, wide=True)

    return Ops(
        rms_norm=kernels.rms_norm,
        add_rms_norm=kernels.add_rms_norm,
        silu_mul=kernels.silu_mul,
        gelu_mul=kernels.gelu_mul,
        rope_store=kernels.rope_store,
        make_linear=make_linear,
        make_logits=make_logits,
        paged_decode=kernels.paged_decode,
        paged_prefill=kernels.paged_prefill,
        prefix_attend=kernels.prefix_attend,
        merge_lse=kernels.merge_lse,
        decisions=(f"kernels: own C kernels for bfloat16 (AVX512-BF16, {threads} threads)",),
    )
