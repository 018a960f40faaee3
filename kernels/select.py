"""Builds `Ops` once for a device, a dtype and a choice, and says in a sentence what became of each part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from inferd.kernels.activation import reference as activation
from inferd.kernels.common.ops import KernelChoice, KernelUnavailable, Ops
from inferd.kernels.cpu.build import default_cache_dir, load_library
from inferd.kernels.cpu.ops import native_ops
from inferd.kernels.cuda.ops import cuda_ops
from inferd.kernels.linear import reference as linear
from inferd.kernels.lora import native as native_lora
from inferd.kernels.lora import reference as lora
from inferd.kernels.lora.rows import AddLora
from inferd.kernels.norm import reference as norm
from inferd.kernels.paged_attention import reference as paged_attention
from inferd.kernels.rope import reference as rope
from inferd.kernels.sampling import reference as sampling


def build_ops(
    device: torch.device, dtype: torch.dtype, choice: KernelChoice = "auto", *, cache_dir: Path | None = None
) -> Ops:
    """The operations for activations and weights of `dtype` on `device`.

    "torch" takes the twins everywhere, "auto" what is fastest here, "native" insists on own kernels. `cache_dir` holds
    kernels compiled for the processor; None: `default_cache_dir()` (Triton keeps its own). The number of threads is
    torch's at this moment. Raises KernelUnavailable when "native" cannot be served, with the reason.
    """
    if choice == "torch":
        return torch_ops("kernels: plain torch, because kernels='torch' asks for it")
    try:
        if device.type == "cuda":
            return cuda_ops(dtype, device, strict=choice == "native")
        if device.type != "cpu":
            raise KernelUnavailable(f"there are none for {device.type} yet")
        if dtype != torch.bfloat16:
            raise KernelUnavailable(f"they compute in bfloat16, not {str(dtype).removeprefix('torch.')}")
        return native_ops(cache_dir or default_cache_dir(), strict=choice == "native")
    except KernelUnavailable as unavailable:
        if choice == "native":
            raise KernelUnavailable(
                f"kernels='native' cannot be served: {unavailable}; kernels='auto' falls back to plain torch"
            ) from unavailable
        return torch_ops(f"kernels: plain torch, because own kernels cannot be used: {unavailable}")


def build_greedy(device: torch.device, choice: KernelChoice = "auto") -> Callable[[Tensor], Tensor]:
    """The choice of the greatest logit on `device`: `sampling.reference.greedy`, or the same as kernels of our own."""
    if device.type != "cuda" or choice == "torch" or find_spec("triton") is None:
        return sampling.greedy
    from inferd.kernels.sampling.triton import greedy

    return greedy


def build_add_lora(
    device: torch.device, dtype: torch.dtype, choice: KernelChoice = "auto", *, cache_dir: Path | None = None
) -> AddLora:
    """The low-rank parts of adapters: `lora.reference.add_lora`, or the same as a kernel of our own where there is one.

    Arguments are those of `build_ops`, which has said by then what cannot be served.
    """
    if device.type == "cuda" and choice != "torch" and find_spec("triton") is not None:
        from inferd.kernels.lora.triton import add_lora

        return add_lora
    if device.type == "cpu" and choice != "torch" and dtype == torch.bfloat16:
        with suppress(KernelUnavailable):
            return native_lora.make_add_lora(load_library(cache_dir or default_cache_dir()))
    return lora.add_lora


def torch_ops(reason: str) -> Ops:
    """The twins; `reason` is their decision."""
    return Ops(
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        silu_mul=activation.silu_mul,
        gelu_mul=activation.gelu_mul,
        rope_store=rope.rope_store,
        make_linear=linear.make_linear,
        make_logits=linear.make_logits,
        paged_decode=paged_attention.paged_decode,
        paged_prefill=paged_attention.paged_prefill,
        prefix_attend=paged_attention.prefix_attend,
        merge_lse=paged_attention.merge_lse,
        decisions=(reason,),
    )
