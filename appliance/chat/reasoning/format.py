"""The marks that models put around their reasoning, and which of them a model uses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import entry_points

from inferd.appliance.chat.events import AnswerParser
from inferd.appliance.chat.reasoning.think import ThinkParser
from inferd.appliance.chat.tools import kimi

GROUP = "inferd.reasoning_parsers"
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ReasoningFormat:
    """A block of reasoning between `start` and `end`; `inferd.reasoning_parsers` entry points are such values.

    `interrupts` end it as well, and belong to the answer. `make_parser` is told whether the prompt opened the block.
    """

    name: str
    start: str
    end: str
    interrupts: tuple[str, ...] = ()
    make_parser: Callable[[ReasoningFormat, bool], AnswerParser] = lambda form, is_open: ThinkParser(
        form.start, form.end, is_open=is_open, interrupts=form.interrupts
    )

    @property
    def markers(self) -> tuple[str, str]:
        return self.start, self.end

    def is_opened_by(self, prompt_end: str) -> bool:
        """Whether a prompt that ends this way leaves the model in the middle of its reasoning."""
        return prompt_end.rstrip().endswith(self.start)

    def is_closed_by(self, prompt_end: str) -> bool:
        """Whether a prompt that ends this way tells the model not to reason."""
        return prompt_end.rstrip().endswith(self.end)


# The section of calls ends reasoning for models that forget to close it; in others' outputs it never stands.
THINK = ReasoningFormat("think", "<think>", "</think>", (kimi.BEGIN,))
BUILT_IN = (
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat("kimi_vl", "◁think▷", "◁/think▷"),
    THINK,
)


def known_formats() -> dict[str, ReasoningFormat]:
    """By name; those of entry points come before the built-in ones, and may replace them.

    Raises `TypeError` for an entry point that is no `ReasoningFormat`.
    """
    found: dict[str, ReasoningFormat] = {}
    for entry in entry_points(group=GROUP):
        value = entry.load()
        if not isinstance(value, ReasoningFormat):
            kind = type(value).__name__
            raise TypeError(f"the entry point {entry.name!r} of {GROUP} is {kind}, not a ReasoningFormat")
        found[value.name] = value
    return {**found, **{known.name: known for known in BUILT_IN if known.name not in found}}


def format_of(template: str | None, tokens: Collection[str], wanted: str = AUTO) -> ReasoningFormat | None:
    """The format called `wanted`, or the one whose marks the template or the vocabulary has; None when neither has any.

    Raises `ValueError` for a name that nobody knows.
    """
    formats = known_formats()
    if wanted == NONE:
        return None
    if wanted != AUTO:
        if wanted not in formats:
            raise ValueError(f"reasoning_parser: there is no {wanted!r}; there are {', '.join([AUTO, NONE, *formats])}")
        return formats[wanted]
    return next(
        (known for known in formats.values() if _has(known, template or "") or set(known.markers) <= set(tokens)), None
    )


def _has(known: ReasoningFormat, template: str) -> bool:
    return known.end in template
