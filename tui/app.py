"""`inferd top`: what goes on in a daemon, and what can be done about it, in a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from textual import on
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input

from inferd.appliance.admin_client import ActFailed, AdminClient, NotAllowed, Unreachable
from inferd.appliance.events.follow import Follower
from inferd.appliance.schemas import TOPICS, ModelStatus, RequestRecord
from inferd.tui.format import FANCY, PLAIN, short_id, span
from inferd.tui.rows import Row
from inferd.tui.screens.confirm import Confirm
from inferd.tui.screens.dashboard import Dashboard
from inferd.tui.screens.help import Help
from inferd.tui.screens.life import Life
from inferd.tui.screens.listing import (
    DOWNLOAD_COLUMNS,
    INCIDENT_COLUMNS,
    KEY_COLUMNS,
    LOG_COLUMNS,
    Listing,
    download_rows,
    incident_detail,
    incident_rows,
    log_rows,
)
from inferd.tui.screens.scheduler import Scheduler
from inferd.tui.widgets.record_table import RecordTable

REDRAW_S = 0.25
BLOCKS_S = 1.0
FORGOTTEN_S = 20.0  # what has ended leaves the table after that


class Top(App[None]):
    """`read_only`: nothing can be done, only looked at. `plain`: ASCII, for terminals that have nothing else."""

    CSS_PATH = "app.tcss"
    TITLE = "inferd"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "colon"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit_or_back", "Quit"),
        Binding("question_mark", "help", "Help"),
        Binding("escape", "leave", "Back", show=False),
        Binding("1", "page('overview')", "Overview", show=False),
        Binding("2", "page('scheduler')", "Scheduler", show=False),
        Binding("3", "page('incidents')", "Incidents", show=False),
        Binding("4", "page('downloads')", "Downloads", show=False),
        Binding("5", "page('keys')", "Keys", show=False),
        Binding("6", "page('log')", "Log", show=False),
        Binding("slash", "filter", "Filter", show=False),
        Binding("s", "sort", "Sort", show=False),
        Binding("x", "cancel_request", "Cancel", show=False),
        Binding("space", "pause_request", "Pause", show=False),
        Binding("plus,equals_sign", "priority(-1)", "Sooner", show=False),
        Binding("minus", "priority(1)", "Later", show=False),
        Binding("l", "load", "Load", show=False),
        Binding("w", "load", "Wake", show=False),
        Binding("u", "unload", "Unload", show=False),
        Binding("z", "sleep(1)", "Sleep", show=False),
        Binding("Z", "sleep(2)", "Sleep deeply", show=False),
        Binding("p", "pin", "Pin", show=False),
    ]

    def __init__(self, client: AdminClient, *, read_only: bool = False, plain: bool = False) -> None:
        super().__init__()
        self.client = client
        self.follower = Follower(client, TOPICS)
        self._read_only = read_only
        self._glyphs = PLAIN if plain else FANCY
        self._keys: list[dict[str, Any]] = []
        self._mates: dict[str, list[str]] = {}
        self._background: set[asyncio.Task[None]] = set()

    def on_mount(self) -> None:
        address, glyphs = self.client.address, self._glyphs
        pages: dict[str, Screen[None]] = {
            "overview": Dashboard(address, glyphs),
            "scheduler": Scheduler(address, glyphs),
            "incidents": Listing(address, INCIDENT_COLUMNS, "nothing went wrong", incident_rows, glyphs),
            "downloads": Listing(address, DOWNLOAD_COLUMNS, "no downloads: inferd pull SOURCE", download_rows, glyphs),
            "keys": Listing(address, KEY_COLUMNS, "no keys: inferd keys create NAME", self._key_rows, glyphs),
            "log": Listing(address, LOG_COLUMNS, "no lines yet", log_rows, glyphs),
        }
        for name, page in pages.items():
            self.install_screen(page, name)
        self.push_screen("overview")
        self._spawn(self.follower.run())
        self.set_interval(REDRAW_S, self._redraw)
        self.set_interval(BLOCKS_S, self._look_closer)

    async def on_unmount(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.client.close()

    def get_system_commands(self, screen: Screen[Any]) -> Any:
        yield from super().get_system_commands(screen)
        for name in ("overview", "scheduler", "incidents", "downloads", "keys", "log"):
            yield SystemCommand(f"Page: {name}", f"Show the {name}", lambda name=name: self._go(name))
        for model in self.follower.mirror.models:
            yield SystemCommand(f"Load {model.id}", model.state, lambda model=model: self._on_model("load", model))
            yield SystemCommand(f"Unload {model.id}", model.state, lambda model=model: self._on_model("unload", model))

    # What is shown

    def _redraw(self) -> None:
        """Also without news: ages grow, and a link that is silent shows it."""
        screen = self.screen
        if not screen.children:  # it is about to be composed
            return
        if isinstance(screen, Dashboard | Scheduler | Listing):
            screen.show(self.follower)
        elif isinstance(screen, Life):
            screen.refresh_records()

    async def _look_closer(self) -> None:
        """What only one screen needs and the stream does not carry."""
        screen = self.screen
        if isinstance(screen, Scheduler) and (model := self._busiest_model()) is not None:
            screen.blocks = await self._quietly(self.client.blocks(model)) or {}
        elif isinstance(screen, Life):
            self._mates[screen.request_id] = await self._quietly(self.client.mates(screen.request_id)) or []
        elif isinstance(screen, Listing) and screen is self.get_screen("keys"):
            self._keys = await self._quietly(self.client.keys()) or []

    def _busiest_model(self) -> str | None:
        ready = [model for model in self.follower.mirror.models if model.state == "ready"]
        return max(ready, key=lambda model: model.kv.blocks_used).id if ready else None

    def _find_request(self, request_id: str) -> RequestRecord | None:
        return next((one for one in self.follower.mirror.requests if one.id == request_id), None)

    def _key_rows(self, follower: Follower) -> list[Row]:
        return [
            Row(
                key["id"],
                (
                    key["name"],
                    key["id"],
                    ", ".join(key["scopes"]),
                    ", ".join(key["models"] or ("all",)),
                    key["lane"],
                    "revoked" if key["revoked_at"] else "valid",
                ),
                "dim" if key["revoked_at"] else "",
            )
            for key in self._keys
        ]

    # Moving about

    def action_page(self, name: str) -> None:
        self._go(name)

    def _go(self, name: str) -> None:
        while len(self.screen_stack) > 2:
            self.pop_screen()
        self.switch_screen(name)
        self.call_after_refresh(self._redraw)

    def action_quit_or_back(self) -> None:
        self.exit()

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_leave(self) -> None:
        if isinstance(self.screen, Dashboard):
            self.screen.end_filter(clear=True)
        elif not isinstance(self.screen, Life):
            self._go("overview")

    def action_filter(self) -> None:
        if isinstance(self.screen, Dashboard):
            self.screen.begin_filter()

    def action_sort(self) -> None:
        if isinstance(self.screen, Dashboard):
            self.notify(f"requests by {self.screen.next_sort()}", timeout=2)
            self._redraw()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        if isinstance(self.screen, Dashboard):
            self.screen.end_filter(clear=False)

    @on(RecordTable.Opened, "#requests")
    def _open_request(self, event: RecordTable.Opened) -> None:
        self.push_screen(Life(event.key, self._find_request, lambda name: self._mates.get(name, []), self._glyphs))

    @on(RecordTable.Opened, "#list")
    def _open_listed(self, event: RecordTable.Opened) -> None:
        incident = next((one for one in self.follower.mirror.incidents if one.id == event.key), None)
        if isinstance(self.screen, Listing) and incident is not None:
            self.screen.show_detail(incident_detail(incident))

    # Acts

    def _chosen_request(self) -> RequestRecord | None:
        screen = self.screen
        if isinstance(screen, Life):
            return self._find_request(screen.request_id)
        key = screen.requests.chosen if isinstance(screen, Dashboard) else None
        return self._find_request(key) if key is not None else None

    def _chosen_model(self) -> ModelStatus | None:
        key = self.screen.models.chosen if isinstance(self.screen, Dashboard) else None
        return next((model for model in self.follower.mirror.models if model.id == key), None)

    def action_cancel_request(self) -> None:
        request = self._chosen_request()
        if request is None or request.finished_at is not None or not self._may_act():
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._do(f"cancel {short_id(request.id)}", lambda: self.client.cancel(request.id))

        self.push_screen(Confirm(f"Cancel request {request.id} of {request.client}?"), answered)

    def action_pause_request(self) -> None:
        if (request := self._chosen_request()) is not None and self._may_act():
            act = self.client.resume if request.state == "paused" else self.client.pause
            word = "resume" if request.state == "paused" else "pause"
            self._do(f"{word} {short_id(request.id)}", lambda: act(request.id))

    def action_priority(self, by: int) -> None:
        if (request := self._chosen_request()) is not None and self._may_act():
            priority = request.priority + by
            what = f"{short_id(request.id)} has priority {priority}"
            self._do(what, lambda: self.client.set_priority(request.id, priority))

    def action_load(self) -> None:
        if (model := self._chosen_model()) is not None:
            self._on_model("load", model)

    def action_unload(self) -> None:
        if (model := self._chosen_model()) is None or not self._may_act():
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._on_model("unload", model)

        inside = f" {model.running} requests finish first." if model.running else ""
        self.push_screen(Confirm(f"Unload {model.id}?{inside}"), answered)

    def action_sleep(self, level: int) -> None:
        if (model := self._chosen_model()) is not None and self._may_act():
            self._do(f"{model.id} sleeps at level {level}", lambda: self.client.sleep(model.id, level))

    def action_pin(self) -> None:
        if (model := self._chosen_model()) is not None and self._may_act():
            word = "unpinned" if model.pinned else "pinned"
            self._do(f"{model.id} is {word}", lambda: self.client.change_options(model.id, pinned=not model.pinned))

    def _on_model(self, act: str, model: ModelStatus) -> None:
        if not self._may_act():
            return
        if act == "load":
            expected = model.expected_wake_s if model.state.startswith("sleeping") else model.expected_load_s
            self.notify(f"{model.id} comes in about {span(expected or 0)}", timeout=3)
            self._do(f"{model.id} is ready", lambda: self.client.load(model.id))
        else:
            self._do(f"{model.id} is unloaded", lambda: self.client.unload(model.id))

    def _may_act(self) -> bool:
        if self._read_only:
            self.notify("this screen is read-only", severity="warning", timeout=3)
        return not self._read_only

    def _do(self, what: str, act: Callable[[], Awaitable[object]]) -> None:
        async def doing() -> None:
            try:
                await act()
                self.notify(what, timeout=3)
            except (ActFailed, NotAllowed, Unreachable) as error:
                self.notify(str(error), title=what, severity="error", timeout=8, markup=False)

        self._spawn(doing())

    async def _quietly(self, asking: Awaitable[Any]) -> Any:
        """None where the daemon does not say: the header already tells why."""
        try:
            return await asking
        except (ActFailed, NotAllowed, Unreachable):
            return None

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
