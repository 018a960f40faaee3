"""Every key, on one page."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Static

HELP = """\
 MOVE      ↑ ↓ j k  row        PgUp PgDn  page        Tab  models ⇄ requests       Enter  open
 SHOW      1  overview         2  scheduler           3  incidents                 4  downloads
           5  keys             6  log                 /  filter                    s  sort requests
 REQUEST   x  cancel           Space  pause/resume    +  sooner                    -  later
 MODEL     l  load             u  unload              z  sleep (Z: level 2)        w  wake
           p  pin/unpin
 ELSE      :  commands         ?  this page           Esc  back                    q  quit

 Filter words: model:NAME client:NAME state:waiting lane:batch, or any text.
 A state is always written out; colour only repeats it.
"""


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "Back")]

    def compose(self) -> ComposeResult:
        yield Static(HELP, id="help", markup=False)

    async def action_dismiss(self, result: None = None) -> None:
        self.dismiss(None)
