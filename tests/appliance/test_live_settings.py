"""One owner of what the daemon runs with: a reload takes all that can change, or nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from inferd.appliance.described import described, values_of
from inferd.appliance.live import AT_LOAD, FIXED, LIVE, LiveSettings, Reloaded, is_read_at_load
from inferd.appliance.reload import reload_settings
from inferd.appliance.sdnotify import Notifier
from inferd.appliance.settings import SettingsError, every_setting, load_settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "inferd.toml"
    path.write_text("")
    return path


@pytest.fixture
def live(config: Path) -> LiveSettings:
    return LiveSettings(load_settings(config=config), lambda: load_settings(config=config))


def test_live_keys_exist() -> None:
    assert {key for key, _ in every_setting()} >= LIVE | AT_LOAD | FIXED


def test_each_new_value_goes_where_it_can(live: LiveSettings, config: Path) -> None:
    told: list[float] = []
    live.on_change(lambda: told.append(live.current.drain_s))
    before = live.current
    config.write_text("port = 1\ndrain_s = 2\n[engine]\nseed = 3\ndevice = 'cpu'\n")
    assert live.reload() == Reloaded(("drain_s",), ("engine.seed",), ("port", "engine.device"))
    now = live.current
    assert (now.port, now.drain_s, now.engine.seed, now.engine.device) == (before.port, 2, 3, "auto")
    assert told == [2]
    assert before.drain_s == 30, "whoever holds the old settings keeps them whole"
    assert live.reload() == Reloaded((), (), ("port", "engine.device"))
    assert told == [2]
    rows = {key: (value, origin) for key, value, origin in live.described()}
    assert rows["port"] == ("4633", "default; 1 after a restart")
    assert rows["drain_s"] == ("2", str(config))
    config.write_text("")
    assert live.reload() == Reloaded(("drain_s",), ("engine.seed",), ())
    assert ("drain_s", "30", "default") in described(live.current)


def test_a_listener_that_fails_does_not_keep_it_from_the_others(live: LiveSettings, config: Path) -> None:
    told: list[str] = []
    live.on_change(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    live.on_change(lambda: told.append("x"))
    config.write_text("sleep_s = 2")
    live.reload()
    assert told == ["x"]


class Ear(Notifier):
    """Writes down what systemd would hear."""

    def __init__(self) -> None:
        super().__init__({})
        self.heard: list[str] = []

    def _send(self, *lines: str) -> None:
        self.heard.extend(line for line in lines if not line.startswith("MONOTONIC"))


@pytest.mark.parametrize(
    ("text", "level", "said", "status"),
    [
        ("drain_s = 2", "INFO", "new values of: drain_s", "up"),
        ("[engine]\nseed = 1", "INFO", "models loaded from now on have new values of: engine.seed", "up"),
        ("port = 2", "WARNING", "needs a restart: port", "up; needs a restart: port"),
        ("drain_s = -2", "ERROR", "stay as they were", "up; settings not reloaded: drain_s: "),
        ("drian_s = 2", "ERROR", "did you mean 'drain_s'", "up; settings not reloaded: "),
        ("", "INFO", "nothing has changed", "up"),
    ],
)
def test_what_a_reload_says(
    live: LiveSettings, config: Path, caplog: pytest.LogCaptureFixture, text: str, level: str, said: str, status: str
) -> None:
    ear, before = Ear(), live.current
    ear.status("up")
    config.write_text(text)
    with caplog.at_level(logging.INFO, "inferd"):
        reload_settings(live, ear)
    assert [record.levelname for record in caplog.records if said in record.getMessage()] == [level]
    assert ear.heard[1:3] == ["RELOADING=1", "READY=1"]
    assert ear.heard[3].startswith(f"STATUS={status}")
    if level == "ERROR":
        assert live.current is before


def test_a_file_that_has_gone_keeps_the_settings(live: LiveSettings, config: Path) -> None:
    config.unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        live.reload()
    config.mkdir()
    with pytest.raises(SettingsError, match="cannot be read"):
        live.reload()
    assert live.current.drain_s == 30


GOOD = b"""port = 4700
drain_s = 3.5
keep_alive = "5m"
allowed_hosts = ["a", "b"]
home = "/srv/inferd"
[engine]
dtype = "float32"
max_model_len = 2048
[engine.speculative]
method = "ngram"
"""


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """What an editor, a template or a full disk makes of a good file: some bytes are others, doubled or missing."""
    text = bytearray(GOOD)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        upto = draw(st.integers(at, min(at + 12, len(text))))
        text[at:upto] = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b"nan", b"-1", b"1e999", b"~nobody/x", b"\n"]))
        )
    return bytes(text[: draw(st.integers(0, len(text)))])


@hypothesis_settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(content=st.one_of(damaged(), st.binary(max_size=60)))
@example(content=b"x = " + b"[" * 3000)
@example(content=b"port = " + b"9" * 5000)
@example(content=b'home = "~nobody-has-this-name/x"')
@example(content=b'home = "a\\u0000b"')
@example(content=b"memory_budget_bytes = 99999999999999999999")
@example(content=b"drain_s = 1979-05-27")
@example(content=b"engine = 3")
@example(content=b"[engine]\nspeculative = []")
def test_whatever_stands_in_the_file(live: LiveSettings, config: Path, content: bytes) -> None:
    """One reload after the other on the same live settings: all of what can change, or nothing and a reason."""
    before = live.current
    config.write_bytes(content)
    try:
        wanted = load_settings(config=config)
    except SettingsError:
        with pytest.raises(SettingsError, match=r"."):
            live.reload()
        assert live.current is before
        return
    live.reload()
    fresh, old = dict(values_of(wanted)), dict(values_of(before))
    for key, value in values_of(live.current):
        assert value == (fresh[key] if key in LIVE or is_read_at_load(key) else old[key]), key
