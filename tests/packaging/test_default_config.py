"""The configuration that is installed names every setting, at its built-in value."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from inferd.appliance.described import values_of
from inferd.appliance.settings import check_file, every_setting, table_of

DEFAULT_CONFIG = Path(__file__).parents[2] / "packaging" / "inferd.toml"
COMMENTED = re.compile(r"^#(?=\[|\w+ = )", re.MULTILINE)
EXAMPLE = "an example: not set is the default"
PLACES = {"home", "run_dir"}  # they depend on the environment
UNSET = "not set"


def test_as_it_is_installed_it_says_nothing() -> None:
    settings = check_file(DEFAULT_CONFIG)
    assert settings.model_fields_set <= {"engine"}
    assert settings.engine.model_fields_set == set()


def test_every_setting_stands_in_it_at_its_default(tmp_path: Path) -> None:
    text = DEFAULT_CONFIG.read_text(encoding="utf-8")
    said = tmp_path / "inferd.toml"
    said.write_text(COMMENTED.sub("", text), encoding="utf-8")
    values = dict(values_of(check_file(said)))
    found = set(re.findall(r"^#(\w+) = ", text, re.MULTILINE))
    names = {key.rpartition(".")[2] for key, field in every_setting() if table_of(field) is None}
    assert names == found, "packaging/inferd.toml must have a line for each setting, and no other"
    for key, field in every_setting():
        if table_of(field) is None and key not in PLACES:
            is_example = re.search(rf"^#{key.rpartition('.')[2]} = .*{EXAMPLE}", text, re.MULTILINE) is not None
            has_default = field.default is not None and not field.is_required()
            assert is_example is not has_default, key
            assert (values[key] == field.default) is has_default, key


def test_every_line_is_explained() -> None:
    lines = DEFAULT_CONFIG.read_text(encoding="utf-8").splitlines()
    silent = [line for before, line in pairwise(lines) if re.match(r"#\w+ = ", line) and not before.startswith("# ")]
    assert not silent
