"""Tokens as bytes, for each kind of tokenizer file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from inferd.engine.errors import LoadError, NotSupported
from inferd.engine.grammar.vocabulary import is_set, pack_bits, read_vocabulary, set_bits
from inferd.engine.testing.model_folder import IM_END_ID, IM_START_ID, make_model_folder

SENTENCEPIECE = ["<unk>", "▁the", "the", "<0xC3>", "<0x0A>", "▁", "é", "</s>"]


def save(tokens: list[str], decoder: decoders.Decoder, folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<unk>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_byte_level(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(make_model_folder(tmp_path / "model"), 272, [IM_END_ID])
    assert vocabulary.tokens[:256] == tuple(bytes([value]) for value in range(256))
    assert vocabulary.tokens[IM_START_ID] is None
    assert vocabulary.tokens[IM_END_ID:] == (None,) * (272 - IM_END_ID)
    assert vocabulary.eos_token_ids == (IM_END_ID,)
    assert vocabulary.num_words == 9


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]),
    ],
    ids=["sentencepiece", "metaspace"],
)
def test_sentencepiece(decoder: decoders.Decoder, tmp_path: Path) -> None:
    vocabulary = read_vocabulary(save(SENTENCEPIECE, decoder, tmp_path), 10, [7, 99])
    assert vocabulary.tokens == (None, b" the", b"the", b"\xc3", b"\n", b" ", "é".encode(), None, b"<tool call>", None)
    assert vocabulary.eos_token_ids == (7,)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="WordPiece"):
        read_vocabulary(save(SENTENCEPIECE, decoders.WordPiece(), tmp_path), 10, [7])
    with pytest.raises(NotSupported, match="end-of-sequence"):
        read_vocabulary(save(SENTENCEPIECE, decoders.ByteLevel(), tmp_path), 10, [])
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path / "nowhere", 10, [7])


def test_bits_of_a_row() -> None:
    row = pack_bits([index in (0, 31, 32, 40) for index in range(41)])
    assert row.tolist() == [-(2**31) + 1, 257]
    set_bits(row, [31, 33], False)
    set_bits(row, [33, 63], True)
    assert [index for index in range(64) if is_set(row, index)] == [0, 32, 33, 40, 63]
    assert not is_set(row, 64)
    assert not is_set(row, -1)
    assert row.dtype == np.int32
