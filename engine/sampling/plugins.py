"""Logits processors that other distributions bring, found by their entry points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from inferd.engine.errors import ConfigError
from inferd.engine.params import SamplingParams

if TYPE_CHECKING:  # it needs torch, which a process without a model does not load
    from inferd.engine.sampling.processors import LogitsProcessor, ProcessorContext

GROUP = "inferd.logits_processors"
_METHODS = ("is_argmax_invariant", "update_state", "is_active", "apply")

ProcessorFactory = Callable[["ProcessorContext"], "LogitsProcessor"]
ParamsCheck = Callable[[SamplingParams], None]


def find_processors() -> list[ProcessorFactory]:
    """Every installed one, ordered by name. Raises `ConfigError` for one that cannot be loaded or is none."""
    found = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    return [_load(point) for point in found]


def params_checks(factories: Sequence[ProcessorFactory]) -> list[ParamsCheck]:
    """What refuses requests that a processor cannot serve; each raises `InvalidRequest`."""
    return [factory.validate_params for factory in factories if hasattr(factory, "validate_params")]


def _load(point: EntryPoint) -> Any:
    way_out = f"uninstall its distribution or mend the entry point {point.name!r} of group {GROUP!r}"
    try:
        loaded = point.load()
    except Exception as error:
        raise ConfigError(
            f"the logits processor {point.value} cannot be loaded: {type(error).__name__}: {error}; {way_out}"
        ) from error
    missing = [name for name in _METHODS if not callable(getattr(loaded, name, None))]
    if not isinstance(loaded, type) or missing:
        lacks = f"lacks {', '.join(missing)}" if missing else "is no class"
        raise ConfigError(f"the logits processor {point.value} {lacks}; {way_out}")
    return loaded
