"""Tokenizers rebuilt from GGUF metadata give the ids that the model was trained on."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2 import tokenization_qwen2

from inferd.engine.errors import LoadError
from inferd.engine.importer.main import import_file
from inferd.engine.importer.pretokenizers import PRE_TOKENIZERS
from inferd.engine.testing.tiny_gguf import tiny_metadata, tiny_tensors, write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def imported(folder: Path, metadata: dict[str, Any]) -> Path:
    """The model folder of a tiny file with this metadata."""
    num_tokens = max(1, len(metadata.get("tokenizer.ggml.tokens", [])))
    source = write_gguf(folder / "model.gguf", metadata, tiny_tensors(num_tokens=num_tokens))
    import_file(source, folder)
    return folder


def tokenizer_of(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_file(str(imported(folder, metadata) / "tokenizer.json"))


def sentencepiece_metadata(words: dict[str, float], **changes: Any) -> dict[str, Any]:
    """A Llama 2 vocabulary: three specials, 256 bytes, then `words` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return tiny_metadata(
        **{
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()),
            "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words),
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.unknown_token_id": 0,
        }
        | changes
    )


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("bytes"), tiny_metadata())


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_byte_level_text_comes_back(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text).ids, skip_special_tokens=False) == text


def test_byte_level_ids_are_positions_in_the_files_list(byte_level: Tokenizer) -> None:
    tokens = tiny_metadata()["tokenizer.ggml.tokens"]
    assert [byte_level.id_to_token(token_id) for token_id in range(len(tokens))] == tokens
    assert byte_level.encode("hello hello").tokens == ["hello", "Ġhello"]
    assert byte_level.encode("1234").tokens == ["1", "2", "3", "4"]


def test_a_control_token_is_one_id_and_left_out_of_text(byte_level: Tokenizer) -> None:
    encoded = byte_level.encode("<|im_start|>hello<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "hello", "<|im_end|>"]
    assert byte_level.decode(encoded.ids) == "hello"


def test_a_user_defined_token_is_one_id_and_stays_in_text(tmp_path: Path) -> None:
    metadata = tiny_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<think it over>"]
    metadata["tokenizer.ggml.token_type"] += [USER_DEFINED]
    tokenizer = tokenizer_of(tmp_path, metadata)
    encoded = tokenizer.encode("hello<think it over>")
    assert encoded.tokens == ["hello", "<think it over>"]
    assert tokenizer.decode(encoded.ids) == "hello<think it over>"


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "it's 2024  now", ["it", "'s", "Ġ2024", "Ġ", "Ġnow"]),
        ("default", "it's 2024", ["it", "'s", "Ġ2024"]),
        ("smollm", "it's 2024", ["it", "'s", "Ġ", "2", "0", "2", "4"]),
        ("starcoder", "x1 23", ["x", "1", "Ġ", "2", "3"]),
        ("llama-bpe", "IT'S 20245\n\n ok", ["IT", "'S", "Ġ", "202", "45", "ĊĊ", "Ġok"]),
        ("llama3", "(ok)", ["(ok", ")"]),
        ("llama-v3", "1234", ["123", "4"]),
        ("qwen2", "IT'S 20245\n", ["IT", "'S", "Ġ", "2", "0", "2", "4", "5", "Ċ"]),
        ("deepseek-r1-qwen", "a 12", ["a", "Ġ", "1", "2"]),
        ("tekken", "HelloWorld it's 12 a//\n", ["Hello", "World", "Ġit", "'s", "Ġ", "1", "2", "Ġa", "//Ċ"]),
    ],
)
def test_text_is_cut_as_the_models_own_tokenizers_cut_it(name: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)] == pieces


def test_patterns_are_those_that_transformers_knows() -> None:
    assert PRE_TOKENIZERS["qwen2"].pattern == tokenization_qwen2.PRETOKENIZE_REGEX
    defaults = TikTokenConverter.__init__.__defaults__
    assert PRE_TOKENIZERS["llama-bpe"].pattern in defaults


def test_qwen2_composes_accents_first(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, tiny_metadata(tokenizer__ggml__pre="qwen2"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


@pytest.mark.parametrize(("pre", "tokens"), [("gpt-2", ["hel", "lo"]), ("llama-bpe", ["hello"])])
def test_a_whole_token_wins_over_merges_where_the_model_says_so(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    metadata = tiny_metadata(tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=False)
    metadata["tokenizer.ggml.tokens"] += ["hel", "lo"]
    metadata["tokenizer.ggml.token_type"] += [NORMAL, NORMAL]
    metadata["tokenizer.ggml.merges"] = ["h e", "he l", "l o"]
    assert tokenizer_of(tmp_path, metadata).encode("hello").tokens == tokens


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, ["hello"]),
        ({"tokenizer__ggml__add_bos_token": True}, ["<|im_start|>", "hello"]),
        ({"tokenizer__ggml__add_eos_token": True}, ["hello", "<|im_end|>"]),
        ({"tokenizer__ggml__pre": "llama-bpe"}, ["<|im_start|>", "hello"]),
        ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}, ["hello"]),
        ({"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": None}, ["hello"]),
    ],
)
def test_first_and_last_tokens_are_added_as_the_file_says(
    tmp_path: Path, changes: dict[str, Any], tokens: list[str]
) -> None:
    folder = imported(tmp_path, tiny_metadata(**changes))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == tokens
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] == (tokens[0] == "<|im_start|>")


def test_a_first_token_whose_name_looks_like_a_template_is_still_one_id(tmp_path: Path) -> None:
    metadata = tiny_metadata(tokenizer__ggml__add_bos_token=True)
    metadata["tokenizer.ggml.tokens"][1] = "$A:1 $B"
    assert tokenizer_of(tmp_path, metadata).encode("hello").ids[0] == 1


def reference_sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: join the best-scored neighbours, the leftmost first, until none can be joined."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not joins:
            return pieces
        _, index = min(joins)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]


def test_sentencepiece_joins_by_score(tmp_path: Path) -> None:
    random_ = random.Random(3)
    pool = {"".join(random_.choices("ab▁", k=random_.randint(2, 4))) for _ in range(40)}
    words = ["a", "b", "▁", *sorted(pool)]
    scores = {word: -float(rank) for rank, word in enumerate(random_.sample(words, len(words)))}
    tokenizer = tokenizer_of(tmp_path, sentencepiece_metadata(scores))
    for _ in range(300):
        text = "".join(random_.choices("ab ", k=random_.randint(1, 12)))
        assert tokenizer.encode(text).tokens == ["<s>", *reference_sentencepiece(text, scores)], text


def test_sentencepiece_spells_unknown_characters_in_bytes(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentencepiece_metadata({"▁": -1.0, "a": -2.0, "▁a": -3.0}))
    encoded = tokenizer.encode("a é😀")
    assert encoded.tokens == ["<s>", "▁a", "▁", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert tokenizer.decode(encoded.ids) == "a é😀"


@pytest.mark.parametrize(("prefix", "tokens"), [(True, ["▁", "a"]), (False, ["a"])])
def test_sentencepiece_space_prefix_is_the_files_choice(tmp_path: Path, prefix: bool, tokens: list[str]) -> None:
    metadata = sentencepiece_metadata({"▁": -1.0, "a": -2.0}, **{"tokenizer.ggml.add_space_prefix": prefix})
    tokenizer = tokenizer_of(tmp_path, metadata)
    assert tokenizer.encode("a", add_special_tokens=False).tokens == tokens
    assert tokenizer.decode(tokenizer.encode("a").ids) == "a"


def with_token(text: str, kind: int, **changes: Any) -> dict[str, Any]:
    metadata = tiny_metadata(**changes)
    metadata["tokenizer.ggml.tokens"] += [text]
    metadata["tokenizer.ggml.token_type"] += [kind]
    return metadata


BAD = {
    "model": (tiny_metadata(tokenizer__ggml__model="bert"), "'bert' is not supported; supported: gpt2, llama"),
    "no model": (tiny_metadata(tokenizer__ggml__model=None), r"tokenizer\.ggml\.model: must be text, but is missing"),
    "pre": (tiny_metadata(tokenizer__ggml__pre="nova"), "'nova' is not supported; supported: default, gpt-2, smollm"),
    "no tokens": (tiny_metadata(tokenizer__ggml__tokens=None), r"tokenizer\.ggml\.tokens: must be an array"),
    "no merges": (tiny_metadata(tokenizer__ggml__merges=None), r"tokenizer\.ggml\.merges: must be an array"),
    "no types": (tiny_metadata(tokenizer__ggml__token_type=None), r"token_type: must be an array"),
    "types": (tiny_metadata(tokenizer__ggml__token_type=[1, 2]), "token_type: has 2 elements for 264 tokens"),
    "kind": (with_token("x y", 9), "token_type: holds the unknown kind 9"),
    "twice": (with_token("hello", NORMAL), "tokens: holds 'hello' twice"),
    "long": (with_token("x" * 2000, NORMAL), "a token of 2000 characters"),
    "merge": (tiny_metadata(tokenizer__ggml__merges=["h e", "hello"]), "'hello' is not a pair"),
    "merge of none": (tiny_metadata(tokenizer__ggml__merges=["h x"]), "'hx' is not a token"),
    "end token": (tiny_metadata(tokenizer__ggml__eos_token_id=264), "eos_token_id: 264 is not a token of 264"),
    "template": (tiny_metadata(tokenizer__chat_template="x" * (1 << 21)), "chat_template: has 2097152 characters"),
    "scores": (sentencepiece_metadata({"a": 1.0}) | {"tokenizer.ggml.scores": [0.5]}, "scores: has 1 for 260 tokens"),
    "NaN": (sentencepiece_metadata({"a": float("nan")}), "scores: holds a number that is not finite"),
    "no unknown": (
        sentencepiece_metadata({"a": 1.0}, **{"tokenizer.ggml.unknown_token_id": None}),
        "unknown_token_id: is missing",
    ),
    "charsmap": (
        sentencepiece_metadata({"a": 1.0}, **{"tokenizer.ggml.precompiled_charsmap": [1, 2]}),
        "normalisation table is not supported",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_vocabulary_is_refused_with_its_cause(tmp_path: Path, case: str) -> None:
    metadata, cause = BAD[case]
    with pytest.raises(LoadError, match=rf"model\.gguf: .*{cause}"):
        imported(tmp_path, metadata)
    assert not (tmp_path / "config.json").exists()


def test_a_padded_embedding_table_is_larger_than_the_vocabulary(tmp_path: Path) -> None:
    metadata = tiny_metadata()
    source = write_gguf(tmp_path / "model.gguf", metadata, tiny_tensors(num_tokens=320))
    import_file(source, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 320

    small = write_gguf(tmp_path / "small.gguf", metadata, tiny_tensors(num_tokens=32))
    with pytest.raises(LoadError, match="32 rows for 264 tokens"):
        import_file(small, tmp_path)
