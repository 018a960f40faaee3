"""Which attention backend serves a model's layers here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from inferd.engine.attention.base import AttentionBackend
from inferd.engine.attention.torch import TorchBackend
from inferd.engine.attention.triton import TritonBackend
from inferd.engine.core.kv.spec import KVSpec, window_of
from inferd.engine.errors import ConfigError
from inferd.kernels.common.ops import Ops

logger = logging.getLogger(__name__)

_BACKENDS: dict[str, Callable[[Ops], AttentionBackend]] = {  # in order of preference
    "TRITON_ATTN": TritonBackend,
    "TORCH": TorchBackend,
}


def choose(
    name: str, ops: Ops, specs: Sequence[KVSpec], device: torch.device, softcap: float | None = None
) -> AttentionBackend:
    """The first backend that serves layers of all `specs`; a name other than "auto" allows one only.

    Raises ConfigError for an unknown name, or with every reason when none can serve.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ConfigError(f"attention_backend={name!r} is unknown; choose one of: auto, {', '.join(_BACKENDS)}")
    refusals = []
    for candidate, make in _BACKENDS.items():
        if name not in ("auto", candidate):
            continue
        backend = make(ops)
        reasons = (backend.supports(spec, device, window_of(spec), softcap) for spec in specs)
        reason = next(filter(None, reasons), None)
        if reason is None:
            logger.info("attention backend: %s", candidate)
            return backend
        level = logging.INFO if name != "auto" or _is_for(backend, device) else logging.DEBUG  # else it was no choice
        logger.log(level, "attention backend %s cannot serve: %s", candidate, reason)
        refusals.append(f"{candidate}: {reason}")
    raise ConfigError(f"attention_backend={name!r} cannot serve this model on {device}: " + "; ".join(refusals))


def _is_for(backend: AttentionBackend, device: torch.device) -> bool:
    return backend.device_types is None or device.type in backend.device_types
