"""The scheduler's steps as a strip: one column a step, its height the tokens of that step against the budget."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from inferd.appliance.schemas import StepRecord
from inferd.tui.format import FANCY, Glyphs, cut


def step_strip(steps: Sequence[StepRecord], width: int, glyphs: Glyphs = FANCY) -> Text:
    """Prefill warm, decode cool, a mark where somebody was preempted; the newest on the right."""
    text = Text()
    top = len(glyphs.ticks) - 1
    for step in steps[-width:]:
        total = step.tokens.prefill + step.tokens.decode + step.tokens.spec
        height = min(total / step.budget, 1.0) if step.budget else 0.0
        style = "red" if step.preempted else "yellow" if step.tokens.prefill else "cyan"
        text.append(
            glyphs.cross if step.preempted else glyphs.ticks[max(round(height * top), 1 if total else 0)], style
        )
    return text


def step_line(step: StepRecord, width: int) -> str:
    """One step in words."""
    kinds = ", ".join(
        f"{count} {kind}"
        for kind, count in (
            ("prefill", step.tokens.prefill),
            ("decode", step.tokens.decode),
            ("spec", step.tokens.spec),
        )
        if count
    )
    graph = f", graph {step.graph}" if step.graph else ""
    text = (
        f"step {step.step}: {kinds or 'nothing'} of {step.budget} tokens in {step.duration_ms:.1f} ms, "
        f"{step.running} run, {step.waiting} wait, "
        f"KV {100 * step.kv_used:.0f}% used {100 * step.kv_cached:.0f}% cached{graph}"
    )
    return cut(text, width)
