"""The backends by name. What a grammar library needs of memory and start-up time is paid when one is first made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from inferd.engine.errors import ConfigError
from inferd.engine.grammar.base import GrammarBackend
from inferd.engine.grammar.formatenforcer import FormatEnforcerBackend
from inferd.engine.grammar.llguidance import LLGuidanceBackend
from inferd.engine.grammar.outlines import OutlinesBackend
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.grammar.vocabulary import Vocabulary
from inferd.engine.grammar.xgrammar import XGrammarBackend

AUTO = ("xgrammar", "llguidance")  # in the order in which they are asked

_BACKENDS: Mapping[str, tuple[type, str]] = {  # class, and the module that it needs
    "xgrammar": (XGrammarBackend, "xgrammar"),
    "llguidance": (LLGuidanceBackend, "llguidance"),
    "outlines": (OutlinesBackend, "outlines_core"),
    "lm-format-enforcer": (FormatEnforcerBackend, "lmformatenforcer"),
}


def choose_backends(name: str) -> tuple[str, ...]:
    """The backends behind `grammar_backend`. Raises `ConfigError` for an unknown one, or one that is not installed."""
    if name == "auto":
        return tuple(backend for backend in AUTO if find_spec(_BACKENDS[backend][1]) is not None)
    if name not in _BACKENDS:
        raise ConfigError(f"grammar_backend={name} is not known; choose one of auto, {', '.join(_BACKENDS)}")
    if find_spec(_BACKENDS[name][1]) is None:
        raise ConfigError(f"grammar_backend={name} is not installed; pip install 'inferd[grammars]', or choose auto")
    return (name,)


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """Imports the library, which takes up to seconds."""
    backend: GrammarBackend = _BACKENDS[name][0](vocabulary)
    return backend


def refusal(name: str, spec: StructuredOutput) -> str | None:
    """What of `spec` the backend cannot enforce, as far as that can be seen without its library."""
    found: str | None = _BACKENDS[name][0].refusal(spec)  # type: ignore[attr-defined]  # a static method of each
    return found
