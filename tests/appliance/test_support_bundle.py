"""A support bundle helps, and gives nothing away."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path

import pytest

from inferd.appliance.auth.keys import KeyStore
from inferd.appliance.doctor.bundle import gather, write_bundle
from inferd.appliance.doctor.finding import failure
from inferd.appliance.doctor.redact import HIDDEN, make_redactor
from inferd.appliance.library.library import Library
from inferd.appliance.library.options import ModelOptions, OptionsStore
from inferd.appliance.schemas import LogLine
from inferd.appliance.settings import Settings

ENVIRONMENT = {"HF_TOKEN": "hunter2-hunter2", "HOME": "/home/ada", "MY_API_KEY": "abc", "PATH": "/usr/bin"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key ifd_abcd1234_" + "x" * 43, f"key {HIDDEN}"),
        ("hf_AbCdEfGhIjKl and sk-proj-12345678", f"{HIDDEN} and {HIDDEN}"),
        ("Authorization: Bearer abcdef123", f"Authorization: {HIDDEN} {HIDDEN}"),
        (r'{"text": "token=\"a b\" x"}', rf'{{"text": "token=\"{HIDDEN}\" x"}}'),
        (r'{"password": "a\"b"}', rf'{{"password": "{HIDDEN}"}}'),
        ('{"api_key": "a b"}', f'{{"api_key": "{HIDDEN}"}}'),
        ("HF_TOKEN=xyz next", f"HF_TOKEN={HIDDEN} next"),
        ("https://ada:pw@host/x", f"https://{HIDDEN}@host/x"),
        ("value hunter2-hunter2.", f"value {HIDDEN}."),
        ("/home/ada/models and /home/adam", "~/models and /home/adam"),
        ("max_tokens: 5, token_ids=[1], abc", "max_tokens: 5, token_ids=[1], abc"),
    ],
)
def test_what_is_taken_out(text: str, expected: str) -> None:
    assert make_redactor(ENVIRONMENT)(text) == expected


def test_a_bundle(inferd_home: Path, tmp_path: Path) -> None:
    with Library.open(inferd_home) as library:
        key = KeyStore(library.database).reset_admin()
        OptionsStore(library.database).put("m", ModelOptions(keep_alive="3m"))
    settings = Settings(home=inferd_home, default_source="hf:ada/private")
    lines = [LogLine(at=1.0, level="info", source="daemon", text=f"a client sent {key}")]
    target = tmp_path / "bundle.tar.gz"
    members = gather(settings, [failure("port", "taken", "Choose another.")], lines)
    written = dict(write_bundle(target, members, make_redactor({**ENVIRONMENT, "HOME": str(tmp_path)})))
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with tarfile.open(target) as archive:
        texts = {name.removeprefix("bundle/"): archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    assert {name: len(text.encode()) for name, text in texts.items()} == written
    assert {"about.json", "doctor.json", "settings.json", "models.json", "incidents.json", "log.jsonl"} <= set(texts)
    assert json.loads(texts["doctor.json"])[0]["check"] == "port"
    for name, text in texts.items():
        if name.endswith(".json"):
            json.loads(text)
        assert key.split("_")[2] not in text
        assert str(tmp_path) not in text
    assert "options" not in "".join(texts), "what a person wrote for a model is nobody else's"
    with pytest.raises(FileExistsError):
        write_bundle(target, iter(()), str)


def test_a_bundle_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def members() -> object:
        yield "a", "b"
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        write_bundle(tmp_path / "x.tar.gz", members(), str)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
