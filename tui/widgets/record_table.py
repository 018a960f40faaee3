"""A table of records with a cursor that stays on its record, drawing only the lines that are seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from inferd.tui.format import FANCY, Glyphs, cut
from inferd.tui.rows import Column, Row, shown

GAP = 1


class RecordTable(ScrollView, can_focus=True):
    """`rows` may be set as often as wanted; what has not changed is not drawn again."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "end(-1)", "First", show=False),
        Binding("end,G", "end(1)", "Last", show=False),
        Binding("enter", "open", "Open", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "table--head",
        "table--cursor",
        "table--dim",
        "table--good",
        "table--warn",
        "table--bad",
    }

    class Opened(Message):
        """Enter on a row."""

        def __init__(self, table: RecordTable, key: str) -> None:
            super().__init__()
            self.table = table
            self.key = key

        @property
        def control(self) -> RecordTable:
            return self.table

    def __init__(self, columns: tuple[Column, ...], empty: str, *, glyphs: Glyphs = FANCY, id: str) -> None:
        super().__init__(id=id)
        self.rows: list[Row] = []
        self.empty_text = empty
        self._columns = columns
        self._glyphs = glyphs
        self._key: str | None = None
        self._index = 0

    @property
    def chosen(self) -> str | None:
        """The key under the cursor."""
        return self.rows[self._index].key if self.rows else None

    def show(self, rows: Sequence[Row]) -> None:
        if self.rows == list(rows):
            return
        self.rows = list(rows)
        self._index = next((index for index, row in enumerate(self.rows) if row.key == self._key), self._index)
        self._index = max(min(self._index, len(self.rows) - 1), 0)
        self._key = self.chosen
        self.virtual_size = Size(self.size.width, len(self.rows) + 1)
        self.refresh()

    def choose(self, key: str) -> None:
        index = next((index for index, row in enumerate(self.rows) if row.key == key), None)
        if index is not None:
            self._go(index)

    def action_move(self, by: int) -> None:
        self._go(self._index + by)

    def action_page(self, by: int) -> None:
        self._go(self._index + by * max(self.size.height - 2, 1))

    def action_end(self, side: int) -> None:
        self._go(0 if side < 0 else len(self.rows) - 1)

    def action_open(self) -> None:
        if self.chosen is not None:
            self.post_message(self.Opened(self, self.chosen))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            titles = tuple(column.title for column in self._columns)
            return self._strip(titles, " ", width, self.get_component_rich_style("table--head"))
        index = y - 1 + self.scroll_offset.y
        if not self.rows and y == 1:
            style = self.get_component_rich_style("table--dim")
            return Strip([Segment(cut(f"  {self.empty_text}", width).ljust(width), style)], width)
        if index >= len(self.rows):
            return Strip.blank(width, self.rich_style)
        row = self.rows[index]
        style = self.get_component_rich_style(f"table--{row.tone}") if row.tone else self.rich_style
        is_chosen = index == self._index
        if is_chosen and self.has_focus:
            style = style + self.get_component_rich_style("table--cursor")
        return self._strip(row.cells, self._glyphs.cursor if is_chosen else " ", width, style)

    def _strip(self, cells: tuple[str, ...], mark: str, width: int, style: Style) -> Strip:
        wanted = shown(self._columns, self.app.size.width)
        fixed = sum(self._columns[index].width + GAP for index in wanted) + 1
        rest = max(width - fixed, 8)
        text = mark
        for index in wanted:
            column = self._columns[index]
            room = column.width or rest
            cell = cut(cells[index].translate(ONE_LINE), room)
            text += (cell.rjust(room) if column.right else cell.ljust(room)) + " " * GAP
        return Strip([Segment(cut(text, width).ljust(width), style)], width)

    def _go(self, index: int) -> None:
        if not self.rows:
            return
        self._index = max(min(index, len(self.rows) - 1), 0)
        self._key = self.chosen
        self.scroll_to_region(Region(0, self._index, 1, 2), animate=False, force=True)
        self.refresh()


ONE_LINE = {
    code: " " for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))
}  # nothing a model is called may move the cursor
