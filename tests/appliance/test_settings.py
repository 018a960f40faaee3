"""Where settings come from, which wins, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from inferd.appliance.settings import EngineSettings, Settings, SettingsError, SpeculativeSettings, load_settings
from inferd.engine.config import EngineArgs, SpeculativeArgs


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "inferd.toml"


def test_defaults(inferd_home: Path) -> None:
    settings = load_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 4633)
    assert settings.home == inferd_home


def test_flags_win_over_environment_over_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("port = 1\ndrain_s = 1\nkeepalive_s = 1\n[engine]\ndtype = 'float32'\nblock_size = 16\n")
    monkeypatch.setenv("INFERD_DRAIN_S", "2")
    monkeypatch.setenv("INFERD_KEEPALIVE_S", "2")
    monkeypatch.setenv("INFERD_ENGINE__BLOCK_SIZE", "32")
    settings = load_settings({"keepalive_s": 3, "model": None}, config)
    assert (settings.port, settings.drain_s, settings.keepalive_s) == (1, 2, 3)
    assert (settings.engine.dtype, settings.engine.block_size) == ("float32", 32)


def test_the_users_file_wins_over_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "inferd").mkdir()
    (tmp_path / "inferd" / "inferd.toml").write_text("port = 5")
    assert load_settings().port == 5


def test_home_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFERD_HOME")
    assert load_settings().home == tmp_path / ".local" / "share" / "inferd"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert load_settings().home == Path("/data/inferd")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean 'port'"),
        ("[engine]\ndtpye = 'auto'", "[engine]: unknown key 'dtpye'; did you mean 'dtype'"),
        (
            "[engine.speculative]\nmethod = 'ngram'\nmodle = 'x'",
            "[speculative]: unknown key 'modle'; did you mean 'model'",
        ),
        ("port = 'x'", "port: "),
        ("port = -1", "port: "),
        ("drain_s = nan", "drain_s: "),
        ("host = '10.0.0.1'", "not a loopback address"),
        ("port = ", "not valid TOML"),
        ("[engine]\ndtype = 'int3'", "engine.dtype: "),
    ],
)
def test_refusals(config: Path, text: str, said: str) -> None:
    config.write_text(text)
    with pytest.raises(SettingsError) as refused:
        load_settings(config=config)
    assert said in str(refused.value)


def test_unknown_environment_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_PROT", "1")
    with pytest.raises(SettingsError, match="INFERD_PORT"):
        load_settings()


@pytest.mark.parametrize("name", ["INFERD_ALLOWED_HOSTS", "INFERD_ENGINE"])
def test_a_variable_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "box.example")
    with pytest.raises(SettingsError, match=rf"{name.removeprefix('INFERD_').lower()}.*as JSON"):
        load_settings()


def test_a_misspelt_name_of_the_files_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_CONFIGG", "/x.toml")
    with pytest.raises(SettingsError, match="did you mean 'INFERD_CONFIG'"):
        load_settings()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        load_settings(config=tmp_path / "nowhere.toml")


def test_the_engine_table_is_engine_args() -> None:
    args = {field.name: field.default for field in dataclasses.fields(EngineArgs) if field.name != "model"}
    assert EngineSettings().model_dump() == args
    assert EngineSettings(max_num_seqs=3).to_args(Path("/m")) == EngineArgs(model="/m", max_num_seqs=3)


def test_a_table_in_the_engine_table(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("[engine.speculative]\nmethod = 'ngram'\nprompt_lookup_min = 2\n")
    args = load_settings(config=config).engine.to_args(Path("/m"))
    assert args.speculative == SpeculativeArgs("ngram", prompt_lookup_min=2)
    monkeypatch.setenv("INFERD_ENGINE__SPECULATIVE__PROMPT_LOOKUP_MIN", "1")
    args = load_settings(config=config).engine.to_args(Path("/m"))
    assert args.speculative == SpeculativeArgs("ngram", prompt_lookup_min=1)
    fields = {field.name for field in dataclasses.fields(SpeculativeArgs)}
    assert fields == set(SpeculativeSettings.model_fields)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]
