"""The life of one request: a time line from its arrival to now, its numbers, who computes beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Static

from inferd.appliance.schemas import RequestRecord
from inferd.tui.format import FANCY, Glyphs, span, thousands
from inferd.tui.rows import why

FindRequest = Callable[[str], RequestRecord | None]
FindMates = Callable[[str], list[str]]


class Life(Screen[None]):
    """`find` is asked at every refresh; a request that is gone keeps what was known of it last."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "back", "Back"),
        Binding("x", "cancel", "Cancel"),
        Binding("space", "pause", "Pause"),
    ]

    def __init__(self, request_id: str, find: FindRequest, find_mates: FindMates, glyphs: Glyphs = FANCY) -> None:
        super().__init__()
        self.request_id = request_id
        self._find = find
        self._find_mates = find_mates
        self._glyphs = glyphs
        self._last: RequestRecord | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="life", markup=False)

    def on_mount(self) -> None:
        self.refresh_records()

    def refresh_records(self) -> None:
        self._last = self._find(self.request_id) or self._last
        if self._last is not None:
            text = life_text(self._last, self._find_mates(self.request_id), self.app.size.width, self._glyphs)
            self.query_one("#life", Static).update(text)

    def action_back(self) -> None:
        self.dismiss(None)

    async def action_cancel(self) -> None:
        await self.app.run_action("cancel_request")

    async def action_pause(self) -> None:
        await self.app.run_action("pause_request")


def life_text(request: RequestRecord, mates: list[str], width: int, glyphs: Glyphs = FANCY) -> Text:
    now = request.finished_at or time.time()
    text = Text()
    text.append(f" {request.id}\n", "bold")
    text.append(f" {request.state}: {why(request)}\n\n")
    text.append_text(timeline(request, width - 4, now, glyphs))
    text.append("\n\n")
    for name, value in facts(request, now):
        text.append(f" {name:<16}", "dim")
        text.append(f"{value}\n")
    text.append(f" {'batch mates':<16}", "dim")
    text.append(", ".join(mates) or "none seen in the last steps")
    return text


def facts(request: RequestRecord, now: float) -> list[tuple[str, str]]:
    computed = f"{thousands(request.computed_tokens)} computed, {thousands(request.cached_tokens)} from the cache"
    found = [
        (
            "client",
            f"{request.client} · {request.lane} · priority {request.priority} · {request.peer} {request.user_agent}",
        ),
        ("model", f"{request.model} by {request.api}" + (f" · session {request.session}" if request.session else "")),
        ("prompt", f"{thousands(request.prompt_tokens)} tokens; {computed}"),
        (
            "answer",
            f"{thousands(request.output_tokens)} of {request.max_tokens or 0} tokens, {request.tokens_per_s:.1f} per s",
        ),
        ("KV blocks", f"{request.kv_blocks}, {request.kv_blocks_peak} at peak · preempted {request.preemptions} times"),
        ("age", span(now - request.arrived_at) + (f" · ends in about {span(request.eta_s)}" if request.eta_s else "")),
    ]
    if request.first_token_at is not None:
        found.append(("first token", f"after {span(request.first_token_at - request.arrived_at)}"))
    if request.spec_drafted:
        found.append(("speculation", f"{request.spec_accepted} of {request.spec_drafted} drafted tokens stood"))
    if request.diverged_at is not None:
        of_whom = f", from {request.diverged_from}" if request.diverged_from else ""
        found.append(("prefix", f"left what was cached at token {thousands(request.diverged_at)}{of_whom}"))
    if request.error:
        found.append(("error", request.error))
    found += [("warning", warning) for warning in request.warnings]
    return found


def timeline(request: RequestRecord, width: int, now: float, glyphs: Glyphs = FANCY) -> Text:
    """Before the engine, in its queue, prefill, decode; as long as each took."""
    begin = request.arrived_at
    marks = [
        (request.admitted_at, "waits for its model", "magenta", glyphs.empty),
        (request.first_scheduled_at or request.first_token_at, "waits in the queue", "yellow", glyphs.empty),
        (request.first_token_at, "prefill", "yellow", glyphs.full),
        (now, "decode", "cyan", glyphs.full),
    ]
    total, text, legend = max(now - begin, 1e-3), Text("  "), Text("  ")
    for end, label, style, glyph in marks:
        if end is None:
            end, is_last = now, True
        else:
            is_last = False
        seconds = max(end - begin, 0.0)
        text.append(glyph * round(width * seconds / total), style)
        if seconds > 0:
            legend.append(f"{label} {span(seconds)}   ", style)
        begin = max(end, begin)
        if is_last:
            break
    return Text("\n").join([text, legend])
