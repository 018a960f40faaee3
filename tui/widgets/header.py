"""The first lines: which daemon, since when, how much goes on, what went wrong, and each device."""

from __future__ import annotations

import time

from rich.text import Text
from textual.widgets import Static

from inferd.appliance.events.follow import Follower
from inferd.appliance.events.mirror import Mirror
from inferd.tui.format import FANCY, Glyphs, cut, span, sparkline, thousands
from inferd.tui.rows import device_line

ALERT_S = 3600.0  # an incident is news for an hour
HISTORY = 120
LINKS = {"connecting": "connecting …", "live": "", "stale": "STALE", "down": "DOWN", "refused": "NO ACCESS"}


class Header(Static):
    def __init__(self, address: str, glyphs: Glyphs = FANCY) -> None:
        super().__init__(id="header")
        self._address = address.removeprefix("http://")
        self._glyphs = glyphs
        self._rates: list[float] = []
        self._used: list[float] = []
        self._sampled_at = 0.0

    def show(self, follower: Follower) -> None:
        mirror, width = follower.mirror, self.app.size.width
        self._sample(mirror)
        lines = [self._first_line(follower, width)]
        lines += [Text(device_line(device, width, self._glyphs)) for device in sorted(mirror.devices, key=_order)]
        self.update(Text("\n").join(lines))

    def _first_line(self, follower: Follower, width: int) -> Text:
        mirror = follower.mirror
        live = [request for request in mirror.requests if request.finished_at is None]
        rate = sum(model.tokens_per_s for model in mirror.models)
        left = Text.assemble((" inferd ", "bold"), (self._address, ""))
        if follower.link != "live":
            old = f" {LINKS[follower.link]} {span(time.monotonic() - follower.since)}"
            left.append(f"{self._glyphs.alert if follower.link != 'connecting' else ''}{old}", "bold red")
            left.append(f" {cut(follower.trouble, max(width - len(left.plain) - 2, 0))}", "red")
            return left
        waiting = sum(request.state in ("queued", "waiting") for request in live)
        middle = f"{len(live)} requests, {waiting} wait · {thousands(rate)} tok/s"
        if width >= 110:
            middle += (
                f" {sparkline(self._rates, 24, self._glyphs)} KV {sparkline(self._used, 12, self._glyphs, top=1.0)}"
            )
        recent = [one for one in mirror.incidents if mirror.at - one.at < ALERT_S]
        alert = f" · {self._glyphs.alert} {len(recent)} incident{'s' if len(recent) > 1 else ''}" if recent else ""
        gap = max(width - len(left.plain) - len(middle) - len(alert) - 1, 1)
        left.append(" " * gap + middle)
        left.append(alert, "bold red")
        return left

    def _sample(self, mirror: Mirror) -> None:
        """Once a second, by the daemon's clock."""
        if mirror.at - self._sampled_at < 1.0:
            return
        self._sampled_at = mirror.at
        blocks = [(model.kv.blocks_used, model.kv.blocks_total) for model in mirror.models]
        total = sum(total for _, total in blocks)
        self._rates = [*self._rates, sum(model.tokens_per_s for model in mirror.models)][-HISTORY:]
        self._used = [*self._used, sum(used for used, _ in blocks) / total if total else 0.0][-HISTORY:]


def _order(device: object) -> tuple[bool, int]:
    index = getattr(device, "index", None)
    return (index is None, index or 0)
