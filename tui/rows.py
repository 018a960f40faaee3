"""What stands in each row of the tables: pure functions from records to cells, shared by the screen and `--once`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inferd.appliance.schemas import DeviceStatus, ModelStatus, RequestRecord
from inferd.tui.format import FANCY, Glyphs, amount, bar, cut, gib, short_id, span, thousands, tokens

LONG_ID = re.compile(r"\b[0-9a-f]{32}\b")
ENDED = ("finished", "failed", "cancelled")
STATE_ORDER = ("decode", "prefill", "preempted", "paused", "waiting", "queued", "failed", "cancelled", "finished")


@dataclass(frozen=True)
class Column:
    title: str
    width: int  # 0: what is left
    right: bool = False
    from_width: int = 0  # the terminal's width from which it is shown


@dataclass(frozen=True)
class Row:
    key: str
    cells: tuple[str, ...]
    tone: str = ""  # "", "dim", "good", "warn", "bad"


MODEL_COLUMNS = (
    Column("MODELS", 0),
    Column("STATE", 14),
    Column("CTX", 5, right=True),
    Column("KV", 13),
    Column("RUN", 4, right=True),
    Column("WAIT", 5, right=True),
    Column("tok/s", 7, right=True),
    Column("UNTIL", 12),
    Column("SIZE", 9, right=True, from_width=110),
    Column("WHY", 24, from_width=140),
)
REQUEST_COLUMNS = (
    Column("REQUEST", 8),
    Column("CLIENT", 8),
    Column("MODEL", 10),
    Column("STATE", 9),
    Column("WHY", 0),
    Column("AGE", 5, right=True),
    Column("OUT", 6, right=True),
    Column("IN", 7, right=True, from_width=110),
    Column("CACHED", 7, right=True, from_width=110),
    Column("BLOCKS", 7, right=True, from_width=120),
    Column("PRE", 4, right=True, from_width=120),
    Column("PRIO", 5, right=True, from_width=140),
)


def shown(columns: tuple[Column, ...], width: int) -> list[int]:
    return [index for index, column in enumerate(columns) if width >= column.from_width]


def model_row(model: ModelStatus, glyphs: Glyphs = FANCY, now: float | None = None) -> Row:
    now = time.time() if now is None else now
    tones = {"ready": "good", "failed": "bad", "on_disk": "dim", "loading": "warn", "waking": "warn"}
    kv = ""
    if model.kv.blocks_total:
        share = model.kv.blocks_used / model.kv.blocks_total
        kv = f"{bar(share, 8, glyphs)} {100 * share:>3.0f}%"
    return Row(
        model.id,
        (
            model.id,
            _state(model),
            tokens(model.context_limit),
            kv,
            str(model.running),
            str(model.waiting),
            thousands(model.tokens_per_s) if model.running else "",
            _until(model, now),
            amount(model.size_bytes),
            model.last_error or model.why,
        ),
        tones.get(model.state, "dim" if model.state.startswith("sleeping") else ""),
    )


def request_row(request: RequestRecord, now: float | None = None) -> Row:
    now = time.time() if now is None else now
    tones = {"failed": "bad", "finished": "dim", "cancelled": "dim", "decode": "good", "prefill": "good"}
    return Row(
        request.id,
        (
            short_id(request.id),
            request.client,
            request.model,
            request.state,
            why(request),
            span((request.finished_at or now) - request.arrived_at),
            str(request.output_tokens),
            str(request.prompt_tokens),
            str(request.cached_tokens),
            str(request.kv_blocks),
            str(request.preemptions),
            str(request.priority),
        ),
        tones.get(request.state, "warn"),
    )


def why(request: RequestRecord) -> str:
    """What it does, or why it does not."""
    if request.reason_text:
        return LONG_ID.sub(lambda found: short_id(found.group()), request.reason_text)
    if request.state == "decode":
        blocks = f", {request.kv_blocks} blocks" if request.kv_blocks else ""
        return f"{request.tokens_per_s:.0f} tok/s{blocks}"
    if request.state == "prefill":
        cached = f" ({thousands(request.cached_tokens)} cached)" if request.cached_tokens else ""
        return f"{thousands(request.computed_tokens)} of {thousands(request.prompt_tokens)}{cached}"
    if request.state == "finished":
        return request.finish_reason or ""
    return request.error or (f"number {request.position}" if request.position else "")


def device_line(device: DeviceStatus, width: int, glyphs: Glyphs = FANCY) -> str:
    memory = device.memory
    name = f"GPU{device.index}" if device.index is not None else "HOST"
    util = f"util {100 * device.util:3.0f}%" if device.util is not None else ""
    gauge = bar(device.util or 0.0, 10, glyphs)
    parts = f"W {gib(memory.weights)} KV {gib(memory.kv)}"
    if memory.graphs or memory.workspace:
        parts += f" work {gib(memory.graphs + memory.workspace)}"
    if memory.sleeping:
        parts += f" sleep {gib(memory.sleeping)}"
    parts += f" other {gib(memory.other)} free {gib(memory.free)} of {gib(memory.total)} GiB"
    if device.temperature_c is not None:
        parts += f" {device.temperature_c:.0f}°C"
    if device.power_w is not None:
        parts += f" {device.power_w:.0f}W"
    return cut(f"{name} {util} {gauge} {parts}", width)


SORTS: dict[str, Callable[[RequestRecord], Any]] = {
    "state": lambda request: (STATE_ORDER.index(request.state), request.arrived_at),
    "age": lambda request: request.arrived_at,
    "client": lambda request: (request.client, request.arrived_at),
    "model": lambda request: (request.model, request.arrived_at),
    "out": lambda request: -request.output_tokens,
    "blocks": lambda request: -request.kv_blocks,
}


def matches(request: RequestRecord, text: str) -> bool:
    """`model:x client:y state:z lane:batch` and plain words; all of them must be there."""
    fields = {"model": request.model, "client": request.client, "state": request.state, "lane": request.lane}
    everything = " ".join((request.id, *fields.values(), request.api, request.session, why(request))).lower()
    for word in text.lower().split():
        name, _, value = word.partition(":")
        if name in fields and value:
            if value not in fields[name].lower():
                return False
        elif word not in everything:
            return False
    return True


def _state(model: ModelStatus) -> str:
    label = model.state.replace("_", " ")
    return f"{label} {100 * model.progress:.0f}%" if model.progress is not None else label


def _until(model: ModelStatus, now: float) -> str:
    if model.state == "failed":
        return f"retry {span((model.retry_at or now) - now)}"
    if model.state == "loading" and model.expected_load_s:
        return f"~{span(model.expected_load_s * (1 - (model.progress or 0)))}"
    if model.state.startswith("sleeping"):
        return f"wakes ~{span(model.expected_wake_s or 0)}"
    if model.state != "ready":
        return ""
    if model.pinned:
        return "pinned"
    if model.expires_at is not None:
        return span(model.expires_at - now)
    return "for ever" if model.keep_alive_s is None else ""
