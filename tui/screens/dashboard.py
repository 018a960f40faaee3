"""The one screen that most people need: devices, models, requests, and why each waits."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Input, Static

from inferd.appliance.events.follow import Follower
from inferd.tui.format import FANCY, Glyphs
from inferd.tui.rows import MODEL_COLUMNS, REQUEST_COLUMNS, SORTS, matches, model_row, request_row
from inferd.tui.widgets.header import Header
from inferd.tui.widgets.record_table import RecordTable
from inferd.tui.widgets.steps import step_strip

HINTS = " ? help  / filter  s sort  ⏎ open  x cancel  space pause  + − priority  l load  z sleep  w wake  p pin"
WIDE = 110


class Dashboard(Screen[None]):
    AUTO_FOCUS = "#requests"

    def __init__(self, address: str, glyphs: Glyphs = FANCY) -> None:
        super().__init__()
        self.sort = "state"
        self._address = address
        self._glyphs = glyphs

    def compose(self) -> ComposeResult:
        yield Header(self._address, self._glyphs)
        yield RecordTable(MODEL_COLUMNS, "no models yet: inferd pull SOURCE", glyphs=self._glyphs, id="models")
        yield Static(id="steps")
        yield RecordTable(REQUEST_COLUMNS, "no requests; they appear as they come", glyphs=self._glyphs, id="requests")
        yield Input(placeholder="model: client: state: lane: or any text; Esc clears", id="filter")
        yield Static(HINTS, id="hints", markup=False)

    def on_mount(self) -> None:
        self.query_one("#filter").display = False

    @property
    def models(self) -> RecordTable:
        return self.query_one("#models", RecordTable)

    @property
    def requests(self) -> RecordTable:
        return self.query_one("#requests", RecordTable)

    @property
    def filter_text(self) -> str:
        return self.query_one("#filter", Input).value

    def show(self, follower: Follower) -> None:
        mirror, width = follower.mirror, self.app.size.width
        self.query_one(Header).show(follower)
        models = sorted(mirror.models, key=lambda model: (model.state == "on_disk", model.id))
        self.models.show([model_row(model, self._glyphs) for model in models])
        wanted = [request for request in mirror.requests if matches(request, self.filter_text)]
        self.requests.show([request_row(request) for request in sorted(wanted, key=SORTS[self.sort])])
        steps = self.query_one("#steps", Static)
        steps.display = width >= WIDE and bool(mirror.steps)
        if steps.display:
            steps.update(step_strip(mirror.steps, width, self._glyphs))

    def next_sort(self) -> str:
        names = list(SORTS)
        self.sort = names[(names.index(self.sort) + 1) % len(names)]
        return self.sort

    def begin_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        box.focus()

    def end_filter(self, clear: bool) -> None:
        box = self.query_one("#filter", Input)
        if clear:
            box.value = ""
        box.display = bool(box.value)
        self.requests.focus()
