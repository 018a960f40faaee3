"""Streamed text equals decoded text, never shows half a character, and never lets a stop string out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from inferd.engine.frontend.detokenize import (
    BYTE_VALUES,
    REPLACEMENT,
    IncrementalDetokenizer,
    StopStringFilter,
    make_decoder,
)
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.params import SamplingParams

SYMBOLS = {value: symbol for symbol, value in BYTE_VALUES.items()}
PAIRED = "aé你好😀👍"  # their bytes also come as tokens of two


def pairs() -> list[bytes]:
    values = sorted({value for character in PAIRED for value in character.encode()})
    return [bytes(pair) for pair in itertools.product(values, repeat=2)]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Ids 0-255 are bytes, then come pairs of bytes that cut across characters, then added tokens."""
    pieces = [bytes([value]) for value in range(256)] + pairs()
    vocab = {"".join(SYMBOLS[value] for value in piece): number for number, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<｜fin▁｜>", special=True)])
    backend.add_tokens(["<think>", "▁｜"])
    return save(backend, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """In the manner of SentencePiece: words with a mark for the space, and single bytes for the rest."""
    words = ["<unk>", "▁", "a", "b", "▁a", "▁the", "▁b", "é"]
    vocab = {piece: number for number, piece in enumerate([*words, *(f"<0x{value:02X}>" for value in range(256))])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(backend, tmp_path_factory.mktemp("byte_fallback"))


def save(backend: Backend, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


def fallback_ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    ids = [tokenizer.backend.token_to_id(f"<0x{value:02X}>") for value in text]
    return [token_id for token_id in ids if token_id is not None]


def stream(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[str]:
    decoder = make_decoder(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(decoder.feed(token_id) for token_id in token_ids), decoder.flush()]


@given(token_ids=st.lists(st.integers(0, 400), max_size=40), skip=st.booleans())
def test_byte_level_stream_is_the_whole_decode(byte_level: Tokenizer, token_ids: list[int], skip: bool) -> None:
    streamed = "".join(stream(byte_level, token_ids, skip_special_tokens=skip))
    assert streamed == byte_level.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text(PAIRED, max_size=20), data=st.data())
def test_tokens_that_cut_characters_show_no_halves(byte_level: Tokenizer, text: str, data: st.DataObject) -> None:
    rest, token_ids = text.encode(), []
    while rest:
        size = data.draw(st.integers(1, min(2, len(rest))))
        token_ids.append(byte_level.backend.token_to_id("".join(SYMBOLS[value] for value in rest[:size])))
        rest = rest[size:]
    pieces = stream(byte_level, token_ids)
    assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)


def test_invalid_bytes_are_told_at_once_and_for_ever(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [0xFF] * 6) == [REPLACEMENT] * 6 + [""]


def test_an_unfinished_character_comes_out_at_the_end(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [65, 0xF0, 0x9F]) == ["A", "", "", REPLACEMENT]


def test_ids_outside_the_vocabulary_are_silent(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [72, 99_999, 105]) == ["H", "", "i", ""]


@given(text=st.text("ab é你😀", max_size=20))
def test_byte_fallback_stream_of_valid_text(byte_fallback: Tokenizer, text: str) -> None:
    assert "".join(stream(byte_fallback, fallback_ids(byte_fallback, text.encode()))) == text


def test_a_leading_space_in_mid_text_survives(byte_fallback: Tokenizer) -> None:
    the, a = (byte_fallback.backend.token_to_id(piece) for piece in ("▁the", "▁a"))
    assert stream(byte_fallback, [the, a]) == [" the", " a", ""]


@given(values=st.binary(max_size=30))
def test_byte_fallback_holds_no_more_than_one_character(byte_fallback: Tokenizer, values: bytes) -> None:
    decoder = make_decoder(byte_fallback, skip_special_tokens=True)
    told = ""
    for number, token_id in enumerate(fallback_ids(byte_fallback, values), 1):
        told += decoder.feed(token_id)
        assert len(told.encode()) >= number - 3
    assert values.decode("utf-8", "ignore").count("a") == (told + decoder.flush()).count("a")


def expected_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first place where a stop string is complete, the longest that is."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


cuts = st.lists(st.text("abc", max_size=4), max_size=12)
stop_strings = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


@given(pieces=cuts, stops=stop_strings, include=st.booleans())
def test_stop_strings_cut_alike_however_text_arrives(pieces: list[str], stops: list[str], include: bool) -> None:
    expected, expected_stop = expected_cut("".join(pieces), stops, include)
    stop_filter = StopStringFilter(stops, include_stop=include)
    out, found = "", None
    for piece in pieces:
        text, found = stop_filter.feed(piece)
        out += text
        assert expected.startswith(out)  # nothing gets out that the cut would take back
        if found is not None:
            break
    else:
        out += stop_filter.flush()
    assert (out, found) == (expected, expected_stop)


def test_only_a_possible_beginning_is_held_back() -> None:
    stop_filter = StopStringFilter(["</end>"], include_stop=False)
    assert [stop_filter.feed(piece)[0] for piece in ("one <", "b> two ", "</", "en", "!")] == [
        "one ",
        "<b> two ",
        "",
        "",
        "</en!",
    ]


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def run(tokenizer: Tokenizer, params: SamplingParams, updates: list[list[int]]) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string after feeding the updates."""
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    text, num_tokens = "", 0
    for token_ids in updates:
        new = detokenizer.update(token_ids)
        text, num_tokens = text + new.text, num_tokens + new.num_tokens
        if new.stop is not None:
            return text, num_tokens, new.stop
    return text + detokenizer.finish(), num_tokens, None


@pytest.mark.parametrize("updates", [["one E", "N", "D two"], ["o", "ne END two"], ["one EN", "D", " two"]])
def test_a_stop_string_across_tokens(byte_level: Tokenizer, updates: list[str]) -> None:
    params = SamplingParams(stop="END")
    text, num_tokens, stop = run(byte_level, params, [bytes_of(piece) for piece in updates])
    assert (text, num_tokens, stop) == ("one ", len("one END"), "END")


def test_a_stop_string_may_be_kept(byte_level: Tokenizer) -> None:
    params = SamplingParams(stop=["END"], include_stop_str_in_output=True)
    assert run(byte_level, params, [bytes_of("one END two")]) == ("one END", 7, "END")


def test_a_stop_string_at_the_very_start(byte_level: Tokenizer) -> None:
    assert run(byte_level, SamplingParams(stop="E"), [bytes_of("END")]) == ("", 1, "E")


def test_what_was_held_back_comes_out_at_the_end(byte_level: Tokenizer) -> None:
    assert run(byte_level, SamplingParams(stop="END"), [bytes_of("one EN")]) == ("one EN", 6, None)


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(2, ("", 3, "END")), (3, ("END a", 8, "END")), (8, ("END aEND", 8, None))]
)
def test_stop_strings_wait_for_min_tokens(
    byte_level: Tokenizer, min_tokens: int, expected: tuple[str, int, str | None]
) -> None:
    """One complete with the last of the first `min_tokens` tokens does not count, as it does not for stop tokens."""
    params = SamplingParams(stop="END", min_tokens=min_tokens)
    assert run(byte_level, params, [bytes_of("END aEND")]) == expected


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_counts_but_is_not_text(byte_level: Tokenizer, include: bool, text: str) -> None:
    params = SamplingParams(stop_token_ids=[99], include_stop_str_in_output=include)
    new = IncrementalDetokenizer(byte_level, params).update(bytes_of("abc"), ends_in_stop_token=True)
    assert (new.text, new.num_tokens) == (text, 3)
