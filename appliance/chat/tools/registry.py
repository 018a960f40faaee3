"""The ways of writing tool calls, and which of them a model uses."""

from __future__ import annotations

from importlib.metadata import entry_points

from inferd.appliance.chat.tools.deepseek import DEEPSEEK
from inferd.appliance.chat.tools.format import ToolFormat
from inferd.appliance.chat.tools.glm import GLM
from inferd.appliance.chat.tools.harmony import HARMONY
from inferd.appliance.chat.tools.hermes import HERMES
from inferd.appliance.chat.tools.kimi import KIMI
from inferd.appliance.chat.tools.llama_json import LLAMA_JSON
from inferd.appliance.chat.tools.mistral import MISTRAL
from inferd.appliance.chat.tools.pythonic import PYTHONIC
from inferd.appliance.chat.tools.qwen_coder import QWEN_CODER

GROUP = "inferd.tool_parsers"
AUTO = "auto"
# What is more particular comes first: several formats share the tags of Hermes.
BUILT_IN = (HARMONY, KIMI, DEEPSEEK, MISTRAL, QWEN_CODER, GLM, HERMES, PYTHONIC, LLAMA_JSON)


def known_formats() -> dict[str, ToolFormat]:
    """By name; those of entry points come before the built-in ones, and may replace them.

    Raises `TypeError` for an entry point that is no `ToolFormat`.
    """
    found: dict[str, ToolFormat] = {}
    for entry in entry_points(group=GROUP):
        value = entry.load()
        if not isinstance(value, ToolFormat):
            raise TypeError(f"the entry point {entry.name!r} of {GROUP} is {type(value).__name__}, not a ToolFormat")
        found[value.name] = value
    return {**found, **{known.name: known for known in BUILT_IN if known.name not in found}}


def format_of(template: str | None, wanted: str = AUTO) -> ToolFormat | None:
    """The format called `wanted`, or the one of that chat template; None when the template shows none.

    Raises `ValueError` for a name that nobody knows.
    """
    formats = known_formats()
    if wanted != AUTO:
        if wanted not in formats:
            raise ValueError(f"tool_parser: there is no {wanted!r}; there are {', '.join([AUTO, *formats])}")
        return formats[wanted]
    return next((known for known in formats.values() if known.accepts(template or "")), None)
