"""`Ops` of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.common.ops import KernelUnavailable, Linear, Ops
from inferd.kernels.cuda.device import card, interpreted
from inferd.kernels.linear import cublas, reference

MIN_CAPABILITY = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cuda_ops(dtype: torch.dtype, device: torch.device, *, strict: bool) -> Ops:
    """Triton kernels for activations of `dtype` on a card; compiled at their first call, into Triton's own cache.

    A weight that the linear kernel cannot serve goes through cuBLAS, or is an error when `strict`. In float32 every
    linear goes through cuBLAS, so that a row's result does not depend on how many rows there are.
    Raises KernelUnavailable.
    """
    _check(dtype, device)
    from inferd.kernels.activation import reference as torch_activation
    from inferd.kernels.activation import triton as activation
    from inferd.kernels.linear import triton as linear
    from inferd.kernels.norm import triton as norm
    from inferd.kernels.paged_attention import triton as paged_attention
    from inferd.kernels.paged_attention import triton_merge as merge
    from inferd.kernels.rope import triton as rope

    def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
        if dtype == torch.float32:
            return reference.make_linear(weight, bias)
        if reason := _refuses(weight, bias, dtype):
            if strict:
                raise KernelUnavailable(f"kernels='native' cannot serve {reason}; choose kernels='auto'")
            return reference.make_linear(weight, bias)
        return linear.make_linear(weight, bias)

    few_rows = f"Triton for up to {linear.MAX_ROWS} rows, cuBLAS above" if dtype != torch.float32 else "cuBLAS"
    return Ops(
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        silu_mul=activation.silu_mul,
        gelu_mul=torch_activation.gelu_mul,
        rope_store=rope.rope_store,
        make_linear=make_linear,
        make_logits=reference.make_logits if dtype == torch.float32 or interpreted() else cublas.make_logits,
        paged_decode=paged_attention.paged_decode,
        paged_prefill=paged_attention.paged_prefill,
        prefix_attend=paged_attention.prefix_attend,
        merge_lse=merge.merge_lse,
        decisions=(
            f"kernels: own Triton kernels for {str(dtype).removeprefix('torch.')} on {_name(device)}",
            f"linear: {few_rows}",
        ),
    )


def _check(dtype: torch.dtype, device: torch.device) -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise KernelUnavailable(f"Triton cannot be imported: {error}") from error
    if dtype not in _DTYPES:
        raise KernelUnavailable(
            f"they compute in bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}"
        )
    if device.type != "cuda" and not interpreted():
        raise KernelUnavailable(f"Triton kernels run on a CUDA card, not on {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise KernelUnavailable("torch sees no CUDA card")
    if (capability := card(device).capability) < MIN_CAPABILITY:
        raise KernelUnavailable(f"{_name(device)} has compute capability {_dotted(capability)}, they need 8.0")


def _refuses(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    if weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return f"a weight or bias of {weight.dtype} with activations of {dtype}"
    if not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        return f"a weight or bias that is not dense (strides {weight.stride()})"
    if weight.shape[1] % 8:
        return f"a weight of {tuple(weight.shape)}: its rows do not begin at multiples of 16 bytes"
    return None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
