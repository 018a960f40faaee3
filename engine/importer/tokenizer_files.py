"""A GGUF vocabulary → tokenizer.json (as a `tokenizers.Tokenizer`) and tokenizer_config.json."""

from __future__ import annotations

import math
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from inferd.engine.importer.pretokenizers import pretokenizer_of
from inferd.engine.importer.sentencepiece import SPACE, merges_from_scores
from inferd.engine.importer.vocabulary import TokenKind, Vocabulary
from inferd.engine.loader.gguf_header import GGUFHeader

MAX_TEMPLATE_CHARS = 1 << 20


def build_tokenizer(header: GGUFHeader, vocabulary: Vocabulary) -> Tokenizer:
    """Raises LoadError naming the key that is missing, wrong or not supported."""
    build = {"gpt2": _byte_level, "llama": _sentencepiece}[vocabulary.model]
    try:
        tokenizer = build(header, vocabulary)
        specials = vocabulary.texts_of(TokenKind.CONTROL, TokenKind.UNKNOWN)
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
        words = vocabulary.texts_of(TokenKind.USER_DEFINED)
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in words])
        _add_template(tokenizer, vocabulary)
    except ValueError as error:
        raise header.error("tokenizer", f"cannot be built: {error}") from error
    if tokenizer.get_vocab_size() != len(vocabulary.tokens):
        raise header.error("tokenizer", f"{len(vocabulary.tokens)} tokens became {tokenizer.get_vocab_size()}")
    return tokenizer


def tokenizer_config_json(header: GGUFHeader, vocabulary: Vocabulary) -> dict[str, Any]:
    named = {
        "bos_token": vocabulary.bos_id,
        "eos_token": vocabulary.eos_id,
        "unk_token": vocabulary.unk_id,
        "pad_token": vocabulary.pad_id,
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    config |= {name: vocabulary.tokens[token_id] for name, token_id in named.items() if token_id is not None}
    if "tokenizer.chat_template" in header.metadata:
        template = header.text("tokenizer.chat_template")
        if len(template) > MAX_TEMPLATE_CHARS:
            raise header.error(
                "tokenizer.chat_template", f"has {len(template)} characters, more than {MAX_TEMPLATE_CHARS}"
            )
        config["chat_template"] = template
    return config


def _byte_level(header: GGUFHeader, vocabulary: Vocabulary) -> Tokenizer:
    pretokenizer = pretokenizer_of(header)
    ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
    merges = [_merge(header, text) for text in header.texts("tokenizer.ggml.merges")]
    if missing := next((part for pair in merges for part in (*pair, "".join(pair)) if part not in ids), None):
        raise header.error("metadata tokenizer.ggml.merges", f"{missing[:40]!r} is not a token")
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pretokenizer.ignore_merges))
    if pretokenizer.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pretokenizer.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(header: GGUFHeader, text: str) -> tuple[str, str]:
    cut = text.find(" ", 1)  # old files hold tokens that begin with a plain space
    if cut < 0 or cut == len(text) - 1:
        raise header.error("metadata tokenizer.ggml.merges", f"{text[:40]!r} is not a pair of tokens")
    return text[:cut], text[cut + 1 :]


def _sentencepiece(header: GGUFHeader, vocabulary: Vocabulary) -> Tokenizer:
    if "tokenizer.ggml.precompiled_charsmap" in header.metadata:
        raise header.error("tokenizer.ggml.precompiled_charsmap", "a normalisation table is not supported")
    if vocabulary.unk_id is None:
        raise header.error("tokenizer.ggml.unknown_token_id", "is missing")
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise header.error("tokenizer.ggml.scores", f"has {len(scores)} for {len(vocabulary.tokens)} tokens")
    if not all(map(math.isfinite, scores)):
        raise header.error("tokenizer.ggml.scores", "holds a number that is not finite")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(vocabulary.tokens)},
            merges=merges_from_scores(vocabulary, scores),
            unk_token=vocabulary.tokens[vocabulary.unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = header.boolean("tokenizer.ggml.add_space_prefix", True)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix else spaces)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _add_template(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """The tokens that encoding adds by itself around a text."""
    ends = {"bos": vocabulary.bos_id if vocabulary.add_bos else None}
    ends["eos"] = vocabulary.eos_id if vocabulary.add_eos else None
    named = {name: token_id for name, token_id in ends.items() if token_id is not None}
    if not named:
        return
    before, after = [name for name in named if name == "bos"], [name for name in named if name == "eos"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]} for name, token_id in named.items()
        ],
    )
