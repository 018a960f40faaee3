"""`hf:` sources against a local hub: selection, verification, gates, broken lines."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.appliance.library.errors import (
    AccessDenied,
    DigestMismatch,
    InvalidSource,
    LibraryError,
    NameTaken,
    NetworkFailure,
    SourceNotFound,
    UnsupportedModel,
)
from inferd.appliance.library.library import Library
from inferd.engine.testing.model_folder import make_model_folder

WEIGHTS = random.Random(5).randbytes(40_000)
GGUF = b"GGUF" + random.Random(6).randbytes(20_000)


@pytest.fixture
def config_files(tmp_path: Path) -> dict[str, bytes]:
    folder = make_model_folder(tmp_path / "original")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def repo_files(config_files: dict[str, bytes]) -> dict[str, bytes]:
    return {
        **config_files,
        "model.safetensors": WEIGHTS,
        "modeling_tiny.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "README.md": b"# Tiny",
    }


@pytest.fixture
def pull(library: Library, fake_hub: Any, make_service: Callable[..., Any]) -> Callable[..., Any]:
    def pull(source: str = "hf:Org/Tiny-1B", *, name: str | None = None, **options: Any) -> Any:
        return make_service(library, hub_url=fake_hub.url, **options).pull(source, name=name)

    return pull


def fetched(hub: Any) -> list[str]:
    """The files asked for, in order, by their last name."""
    return [request.path.rpartition("/")[2] for request in hub.server.requests if "/resolve/" in request.path]


def test_a_repository_becomes_a_model(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes]
) -> None:
    commit = fake_hub.add("Org/Tiny-1B", repo_files)
    record = pull()
    assert (record.id, record.aliases, record.revision) == ("org/tiny-1b", ("tiny-1b",), commit)
    assert (record.format, record.quantisation, record.source) == ("safetensors", None, "hf:Org/Tiny-1B")
    folder = library.folder(record)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {path.name for path in folder.iterdir()} == set(repo_files) - {
        "modeling_tiny.py",
        "pytorch_model.bin",
        "README.md",
    }
    assert library.find("tiny-1b") == record
    assert fetched(fake_hub)[0] == "config.json"
    assert fetched(fake_hub)[-1] == "model.safetensors"


def test_shards_are_fetched_with_their_index(
    library: Library, fake_hub: Any, pull: Callable[..., Any], config_files: dict[str, bytes]
) -> None:
    shards = {f"model-0000{number}-of-00002.safetensors": WEIGHTS + bytes([number]) for number in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    fake_hub.add("Org/Tiny-1B", {**config_files, **shards, "model.safetensors.index.json": index})
    folder = library.folder(pull())
    assert {name: (folder / name).read_bytes() for name in shards} == shards


@pytest.mark.parametrize(
    "index",
    [b"{", b"[]", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"a": "../../x"}}', b"[" * 100_000],
)
def test_an_index_that_names_what_is_not_there_costs_no_weights(
    fake_hub: Any, pull: Callable[..., Any], config_files: dict[str, bytes], index: bytes
) -> None:
    shard = {"model-00001-of-00001.safetensors": WEIGHTS}
    fake_hub.add("Org/Tiny-1B", {**config_files, **shard, "model.safetensors.index.json": index})
    with pytest.raises(UnsupportedModel, match="index"):
        pull()
    assert fake_hub.cdn.requests == []


def test_one_gguf_of_many_is_chosen(library: Library, fake_hub: Any, pull: Callable[..., Any]) -> None:
    fake_hub.add("Org/Tiny-GGUF", {"Tiny-Q4_K_M.gguf": GGUF, "q8/Tiny-Q8_0.gguf": GGUF + b"8", "Tiny-F16.gguf": GGUF})
    with pytest.raises(InvalidSource, match=r"3 GGUF files.*Tiny-Q4_K_M\.gguf"):
        pull("hf:Org/Tiny-GGUF")
    record = pull("hf:Org/Tiny-GGUF:q8_0")
    assert (record.id, record.quantisation, record.format) == ("org/tiny-q8_0", "Q8_0", "gguf")
    assert (library.folder(record) / "model.gguf").read_bytes() == GGUF + b"8"
    assert pull("hf:Org/Tiny-GGUF:Tiny-Q4_K_M.gguf").id == "org/tiny-q4_k_m"
    assert len(library.list_models()) == 2


def test_a_revision_is_a_model_of_its_time(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes]
) -> None:
    first = fake_hub.add("Org/Tiny-1B", repo_files)
    second = fake_hub.add("Org/Tiny-1B", repo_files | {"model.safetensors": WEIGHTS[::-1]})
    old = pull(f"hf:Org/Tiny-1B@{first}")
    assert (old.revision, (library.folder(old) / "model.safetensors").read_bytes()) == (first, WEIGHTS)
    new = pull()
    assert (new.revision, (library.folder(new) / "model.safetensors").read_bytes()) == (second, WEIGHTS[::-1])
    assert library.list_models() == [new]
    assert not library.folder(old).exists()
    with pytest.raises(SourceNotFound, match="no revision v9"):
        pull("hf:Org/Tiny-1B@v9")


def test_an_architecture_that_is_not_served_costs_no_weights(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes]
) -> None:
    config = json.loads(repo_files["config.json"]) | {"architectures": ["GPT99ForCausalLM"]}
    fake_hub.add("Org/Tiny-1B", repo_files | {"config.json": json.dumps(config).encode()})
    with pytest.raises(UnsupportedModel, match="GPT99ForCausalLM is not supported"):
        pull()
    assert "model.safetensors" not in fetched(fake_hub)
    assert library.list_models() == []


def test_a_repository_that_wants_to_run_code_is_refused(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes]
) -> None:
    config = json.loads(repo_files["config.json"]) | {"auto_map": {"AutoModel": "modeling_tiny.Tiny"}}
    fake_hub.add("Org/Tiny-1B", repo_files | {"config.json": json.dumps(config).encode()})
    with pytest.raises(UnsupportedModel, match="auto_map"):
        pull()
    assert "modeling_tiny.py" not in fetched(fake_hub)


def test_pickled_weights_are_refused_naming_convert(
    fake_hub: Any, pull: Callable[..., Any], config_files: dict[str, bytes]
) -> None:
    fake_hub.add("Org/Tiny-1B", {**config_files, "pytorch_model.bin": b"pickle"})
    with pytest.raises(UnsupportedModel, match="inferd convert"):
        pull()


def test_a_gated_repository_needs_a_token(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes]
) -> None:
    fake_hub.add("Org/Tiny-1B", repo_files, token="hf_right")
    with pytest.raises(AccessDenied, match="set HF_TOKEN") as caught:
        pull()
    assert caught.value.exit_code == 6
    with pytest.raises(AccessDenied, match="the token in HF_TOKEN may not read it") as caught:
        pull(token="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    assert pull(token="hf_right").id == "org/tiny-1b"
    assert all("authorization" not in request.headers for request in fake_hub.cdn.requests)


def test_a_repository_that_is_not_there(fake_hub: Any, pull: Callable[..., Any]) -> None:
    with pytest.raises(AccessDenied, match="if it is gated or private"):  # the hub does not tell strangers
        pull()


def test_a_line_that_is_cut_goes_on_where_it_was(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes]
) -> None:
    fake_hub.add("Org/Tiny-1B", repo_files)
    fake_hub.cdn.faults.cut_after = [15_000, 10_000]
    pull()
    assert [request.headers.get("range") for request in fake_hub.cdn.requests] == [
        None,
        "bytes=15000-",
        "bytes=25000-",
    ]


def test_a_later_pull_uses_what_an_earlier_one_got(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes]
) -> None:
    fake_hub.add("Org/Tiny-1B", repo_files)
    fake_hub.cdn.faults.cut_after = [15_000, 0, 0, 0]
    with pytest.raises(NetworkFailure):
        pull()
    assert library.list_models() == []
    fake_hub.server.requests.clear()
    fake_hub.cdn.requests.clear()
    pull()
    assert fetched(fake_hub) == ["model.safetensors"]
    assert [request.headers.get("range") for request in fake_hub.cdn.requests] == ["bytes=15000-"]


def test_parts_of_an_older_revision_do_not_stay(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes]
) -> None:
    fake_hub.add("Org/Tiny-1B", repo_files)
    fake_hub.cdn.faults.cut_after = [15_000, 0, 0, 0]
    with pytest.raises(NetworkFailure):
        pull()
    fake_hub.add("Org/Tiny-1B", repo_files | {"model.safetensors": WEIGHTS[::-1]})
    assert (library.folder(pull()) / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert [path for path in (library.models_folder / ".partial").iterdir()] == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_bytes_that_are_not_the_announced_ones_do_not_come_in(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes], name: str
) -> None:
    fake_hub.add("Org/Tiny-1B", repo_files)
    (fake_hub.cdn if name.endswith(".safetensors") else fake_hub.server).faults.flip_at = [100]
    with pytest.raises(DigestMismatch, match=name.replace(".", r"\.")):
        pull()
    assert library.list_models() == []
    assert pull().id == "org/tiny-1b"


@pytest.mark.parametrize(
    ("status", "error", "word"),
    [
        (503, NetworkFailure, "503"),
        (429, NetworkFailure, "429"),
        (403, AccessDenied, "HF_TOKEN"),
        (418, LibraryError, "418"),
    ],
)
def test_a_hub_in_trouble(
    fake_hub: Any, pull: Callable[..., Any], make_reply: Callable[..., Any], status: int, error: Any, word: str
) -> None:
    fake_hub.overrides["/api/models/Org/Tiny-1B"] = make_reply(status)
    with pytest.raises(error, match=word):
        pull()


def test_a_hub_that_nobody_answers_at(fake_hub: Any, pull: Callable[..., Any]) -> None:
    fake_hub.server.close()
    fake_hub.server.close = lambda: None
    with pytest.raises(NetworkFailure, match="pull again later"):
        pull()


def test_offline_mode_is_named(fake_hub: Any, pull: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LibraryError, match="HF_HUB_OFFLINE is set"):
        pull()


def test_a_hub_may_not_send_us_to_a_file(
    fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes], make_reply: Callable[..., Any]
) -> None:
    commit = fake_hub.add("Org/Tiny-1B", repo_files)
    target = make_reply(302, headers={"location": "file:///etc/passwd"})
    fake_hub.overrides[f"/Org/Tiny-1B/resolve/{commit}/model.safetensors"] = target
    with pytest.raises(LibraryError):
        pull()


def test_a_name_of_ones_own(
    library: Library, fake_hub: Any, pull: Callable[..., Any], repo_files: dict[str, bytes]
) -> None:
    fake_hub.add("Org/Tiny-1B", repo_files)
    fake_hub.add("Other/Model", repo_files | {"model.safetensors": GGUF})
    assert pull(name="mine").id == "mine"
    with pytest.raises(NameTaken, match=r"mine is in the library from hf:Org/Tiny-1B.*--name"):
        pull("hf:Other/Model", name="mine")
    with pytest.raises(LibraryError, match="cannot be a model's name"):
        pull(name="../mine")
    assert [record.id for record in library.list_models()] == ["mine"]
