"""The scheduler as a picture: what each step computed, who has each block, and how that went over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Static

from inferd.appliance.events.follow import Follower
from inferd.appliance.schemas import StepRecord
from inferd.tui.format import FANCY, Glyphs, cut, short_id, sparkline
from inferd.tui.widgets.header import Header
from inferd.tui.widgets.steps import step_line, step_strip

OWNER_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")
MAP_ROWS = 8


class Scheduler(Screen[None]):
    """`blocks`: the block map of the model that is shown, as the daemon gave it last."""

    def __init__(self, address: str, glyphs: Glyphs = FANCY) -> None:
        super().__init__()
        self.blocks: dict[str, Any] = {}
        self._address = address
        self._glyphs = glyphs

    def compose(self) -> ComposeResult:
        yield Header(self._address, self._glyphs)
        yield Static(id="picture", markup=False)
        yield Static(" 1 overview  2 scheduler  ? help  q quit", id="hints", markup=False)

    def show(self, follower: Follower) -> None:
        self.query_one(Header).show(follower)
        picture = scheduler_text(follower.mirror.steps, self.blocks, self.app.size.width - 2, self._glyphs)
        self.query_one("#picture", Static).update(picture)


def scheduler_text(steps: Sequence[StepRecord], blocks: dict[str, Any], width: int, glyphs: Glyphs = FANCY) -> Text:
    if not steps:
        return Text("\n no step yet: nothing has run since this screen was opened", "dim")
    text = Text("\n tokens a step", "dim")
    text.append(" (yellow: with prefill, cyan: decode alone, red: somebody was preempted)\n ", "dim")
    text.append_text(step_strip(steps, width - 2, glyphs))
    text.append("\n\n KV in use\n ", "dim")
    text.append(sparkline([step.kv_used for step in steps], width - 2, glyphs, top=1.0).lstrip(), "cyan")
    text.append("\n running\n ", "dim")
    text.append(sparkline([float(step.running) for step in steps], width - 2, glyphs).lstrip(), "green")
    text.append("\n waiting\n ", "dim")
    text.append(sparkline([float(step.waiting) for step in steps], width - 2, glyphs).lstrip(), "yellow")
    text.append(f"\n\n {step_line(steps[-1], width)}\n")
    shares = "  ".join(f"{short_id(share.id)} {share.tokens}" for share in steps[-1].requests)
    text.append(f" {cut(shares, width)}\n\n")
    text.append_text(block_map(blocks, width, glyphs))
    return text


def block_map(blocks: dict[str, Any], width: int, glyphs: Glyphs = FANCY) -> Text:
    """One cell for one block or, where there are more blocks than cells, for the owner of the first of several."""
    runs, total = blocks.get("runs", []), blocks.get("num_blocks", 0)
    if not total:
        return Text("")
    cells = min(total, (width - 2) * MAP_ROWS)
    per_cell = total / cells
    owners = _spread(runs, cells, per_cell)
    names = list(dict.fromkeys(name for kind, name in owners if kind == "used" and name))
    text = Text(f" {total} blocks, {per_cell:.1f} a cell\n ", "dim")
    for index, (kind, name) in enumerate(owners):
        if index and index % (width - 2) == 0:
            text.append("\n ")
        if kind == "used":
            colour = OWNER_COLOURS[names.index(name) % len(OWNER_COLOURS)] if name in names else "white"
            text.append(short_id(name or "?")[0].upper() if name else glyphs.full, colour)
        else:
            text.append(glyphs.empty if kind == "cached" else "·", "dim")
    text.append(f"\n letters: requests  {glyphs.empty} cached  · free", "dim")
    return text


def _spread(runs: Sequence[dict[str, Any]], cells: int, per_cell: float) -> list[tuple[str, str | None]]:
    owners: list[tuple[str, str | None]] = []
    seen = 0
    for run in runs:
        seen += run["count"]
        while len(owners) < cells and len(owners) * per_cell < seen:
            owners.append((run["owner"], run.get("request_id")))
    return owners
