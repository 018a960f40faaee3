"""Plots as numbers for inline SVG: pure functions from records to coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferd.appliance.schemas import DeviceMemory, StepRecord

PARTS = ("weights", "kv", "graphs", "workspace", "sleeping", "other", "free")
STEPS_SHOWN = 120
MAP_COLUMNS = 128
MAP_ROWS = 16
NUM_OWNER_COLOURS = 12


@dataclass(frozen=True)
class Segment:
    """One part of a bar, in thousandths of its length."""

    name: str
    bytes: int
    start: float
    length: float


def memory_segments(memory: DeviceMemory) -> list[Segment]:
    """Of all parts that there are; they fill the bar."""
    found, start = [], 0.0
    for name in PARTS:
        num_bytes = getattr(memory, name)
        length = 1000.0 * num_bytes / memory.total if memory.total else 0.0
        if num_bytes:
            found.append(Segment(name, num_bytes, round(start, 2), round(length, 2)))
        start += length
    return found


@dataclass(frozen=True)
class Line:
    points: str
    last: float
    top: float


def line(values: Sequence[float], top: float | None = None, width: int = 240, height: int = 40) -> Line:
    """A sparkline; the newest on the right."""
    highest = top if top is not None else max(max(values, default=0.0), 1e-9)
    step = width / max(len(values) - 1, 1)
    points = " ".join(
        f"{index * step:.1f},{height - height * min(value / highest, 1.0):.1f}" for index, value in enumerate(values)
    )
    return Line(points, values[-1] if values else 0.0, highest)


@dataclass(frozen=True)
class StepBar:
    """One step: heights in thousandths of the budget, from the bottom up; `mark`: somebody was preempted."""

    step: int
    x: int
    prefill: float
    decode: float
    spec: float
    mark: bool
    title: str
    shares: str


def step_bars(steps: Sequence[StepRecord]) -> list[StepBar]:
    shown = steps[-STEPS_SHOWN:]
    return [_step_bar(step, index + STEPS_SHOWN - len(shown)) for index, step in enumerate(shown)]


def _step_bar(step: StepRecord, x: int) -> StepBar:
    budget = max(step.budget, 1)
    tokens = step.tokens
    return StepBar(
        step=step.step,
        x=x,
        prefill=round(1000 * tokens.prefill / budget, 1),
        decode=round(1000 * tokens.decode / budget, 1),
        spec=round(1000 * tokens.spec / budget, 1),
        mark=bool(step.preempted),
        title=f"step {step.step}: {tokens.prefill} prefill, {tokens.decode} decode, {tokens.spec} speculative of "
        f"{step.budget} tokens in {step.duration_ms:.1f} ms",
        shares=" ".join(f"{share.id}:{share.tokens}" for share in step.requests),
    )


@dataclass(frozen=True)
class Cell:
    x: int
    y: int
    kind: str  # null, free, cached, used
    colour: int  # of used cells: which of the owner colours
    owner: str
    count: int  # blocks in this cell


def block_cells(blocks: dict[str, Any]) -> list[Cell]:
    """One cell a block, or several blocks a cell where there are many; the owner is that of the cell's first block."""
    total = blocks.get("num_blocks", 0)
    if not total:
        return []
    cells = min(total, MAP_COLUMNS * MAP_ROWS)
    per_cell = total / cells
    found: list[Cell] = []
    colours: dict[str, int] = {}
    seen = 0
    for run in blocks["runs"]:
        seen += run["count"]
        owner = run.get("request_id") or ""
        while len(found) < cells and len(found) * per_cell < seen:
            colour = colours.setdefault(owner, len(colours) % NUM_OWNER_COLOURS) if run["owner"] == "used" else 0
            index = len(found)
            found.append(
                Cell(index % MAP_COLUMNS, index // MAP_COLUMNS, run["owner"], colour, owner, max(round(per_cell), 1))
            )
    return found
