"""The README's table of settings is the settings there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from inferd.appliance.settings import every_setting, load_settings, variable_of

README = Path(__file__).parents[2] / "README.md"
ROW = re.compile(r"^\| `(?P<key>[\w.]+)` \| (?P<default>[^|]+) \| `(?P<variable>INFERD_\w+)` \| (?P<meaning>[^|]+) \|$")
PLACES = {"home": "`~/.local/share/inferd`", "run_dir": "`$XDG_RUNTIME_DIR/inferd`"}  # they depend on the environment
TABLES = ("engine", "engine.speculative")  # their keys have rows of their own


def shown(key: str, default: Any) -> str:
    """As TOML writes it."""
    if key in PLACES:
        return PLACES[key]
    if default is None or default is PydanticUndefined:
        return "not set"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, str):
        return f'`"{default}"`'
    return "`[]`" if default == () else f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def test_every_setting_has_its_row() -> None:
    text = README.read_text(encoding="utf-8")
    rows = {row["key"]: (row["default"], row["variable"]) for row in map(ROW.match, text.splitlines()) if row}
    expected = {
        key: (shown(key, field.default), variable_of(key)) for key, field in every_setting() if key not in TABLES
    }
    missing = [f"| `{key}` | {expected[key][0]} | `{expected[key][1]}` | … |" for key in expected.keys() - rows.keys()]
    assert not missing, "README.md lacks rows"
    assert rows == expected


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "inferd.toml").write_text(example)
    assert load_settings(config=tmp_path / "inferd.toml").port == 4700
