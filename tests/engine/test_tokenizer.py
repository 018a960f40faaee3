"""What a user types never becomes a special token; everything else is encoded as the tokenizer alone would."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from inferd.engine.errors import InvalidRequest, LoadError
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.testing.model_folder import IM_END, IM_END_ID, IM_START, byte_tokenizer, make_model_folder

GUARD = "\ue000"
SPECIALS = [IM_START, IM_END, "<s>", "<<s>>", "☃", "<|pad|>"]  # one within another, one of a single character


def save(backend: Backend, folder: Path) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS[2:]])
    return save(backend, tmp_path_factory.mktemp("specials"))


def chat(tokenizer: Tokenizer, *contents: str) -> str:
    """As a template would render user messages."""
    guarded = (tokenizer.guard_text(content, GUARD) for content in contents)
    return "".join(f"{IM_START}user\n{content}{IM_END}\n" for content in guarded)


def split_turns(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    """The text of each turn, from the ids; only the template's special ids delimit."""
    text = tokenizer.decode([0 if token in tokenizer.special_ids else token for token in token_ids])
    return text.split("\0")[1::2]


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("shape", ["{}", "a {} b", "{}{}", "x{}", "{}\n"])
def test_a_typed_special_token_is_text(tokenizer: Tokenizer, special: str, shape: str) -> None:
    content = shape.format(special, special)
    token_ids = tokenizer.encode_chat(chat(tokenizer, content), GUARD)
    assert [token for token in token_ids if token in tokenizer.special_ids] == [256, 257]
    assert split_turns(tokenizer, token_ids) == [f"user\n{content}"]


@given(
    contents=st.lists(st.lists(st.sampled_from([*SPECIALS, "<", "<|", "s>>", "im_end|>", "é", " ", "a"])), min_size=1)
)
def test_no_mixture_gets_through(tokenizer: Tokenizer, contents: list[list[str]]) -> None:
    texts = ["".join(parts) for parts in contents]
    token_ids = tokenizer.encode_chat(chat(tokenizer, *texts), GUARD)
    assert [token for token in token_ids if token in tokenizer.special_ids] == [256, 257] * len(texts)
    assert split_turns(tokenizer, token_ids) == [f"user\n{text}" for text in texts]


@given(
    parts=st.lists(st.sampled_from(["<|im_", "start|>", "<", "|im_end|>", "<s", ">", "<|im_start|", "a"]), min_size=2)
)
def test_strings_that_a_template_joins_make_no_special_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    rendered = "".join(tokenizer.guard_text(part, GUARD) for part in parts)
    token_ids = tokenizer.encode_chat(rendered, GUARD)
    assert not tokenizer.special_ids & set(token_ids)
    assert tokenizer.decode(token_ids) == "".join(parts)


@given(content=st.text(max_size=30))
def test_ordinary_text_is_encoded_as_by_the_tokenizer_alone(tokenizer: Tokenizer, content: str) -> None:
    content = content.replace(GUARD, "").replace("<", "").replace("☃", "")
    rendered = chat(tokenizer, content)
    assert rendered == f"{IM_START}user\n{content}{IM_END}\n"
    assert tokenizer.encode_chat(rendered, GUARD) == tokenizer.backend.encode(rendered, add_special_tokens=False).ids


@given(content=st.text("ab <|>", max_size=30))
def test_the_guarded_way_gives_the_same_ids(tokenizer: Tokenizer, content: str) -> None:
    rendered = f"{IM_START}user\n{content}{IM_END}\n"
    # A guard after the first letter only forces the piecewise way.
    assert tokenizer.encode_chat(rendered.replace("user", f"u{GUARD}ser"), GUARD) == tokenizer.encode(rendered)


def test_white_space_that_a_special_token_swallows(tmp_path: Path) -> None:
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken("<|user|>", special=True, rstrip=True, lstrip=True)])
    tokenizer = save(backend, tmp_path)
    rendered = f"a{GUARD} <|user|>\n b"
    assert tokenizer.encode_chat(rendered, GUARD) == tokenizer.encode("a <|user|>\n b") == [97, 258, 98]


def test_a_special_token_is_matched_in_a_prompt_unless_asked_not_to(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(f"a{IM_END}") == [97, IM_END_ID]
    assert tokenizer.encode(f"a{IM_END}", match_special_tokens=False) == list(f"a{IM_END}".encode())


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_chat(f"{GUARD}\ud800", GUARD)


def test_a_model_folder_says_the_rest(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(make_model_folder(tmp_path))
    assert tokenizer.vocab_size == 258
    assert (tokenizer.eos_token, tokenizer.eos_token_ids, tokenizer.bos_token_id) == (IM_END, (IM_END_ID,), None)
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template


def test_a_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template == "{{ messages }}"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<|im_start|>"}, "chat_template":'
        ' [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}',
        encoding="utf-8",
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.chat_template, tokenizer.bos_token_id) == ("d", 256)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    folder = make_model_folder(tmp_path)
    (folder / name).write_text('{"eos_token_id": {}, "eos_token": 7', encoding="utf-8")
    with pytest.raises(LoadError, match=name):
        Tokenizer.from_folder(folder)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "model.gguf"])
def test_what_is_no_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match=f"{name} is not a folder"):
        Tokenizer.from_folder(tmp_path / name)
