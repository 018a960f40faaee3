"""The vocabulary in a GGUF file's metadata, checked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from inferd.engine.importer.pretokenizers import pretokenizer_of
from inferd.engine.loader.gguf_header import GGUFHeader

MAX_TOKEN_CHARS = 1024  # deriving merges looks at each way to cut a token in two

# Texts that end a turn or a document in the chat formats of the supported architectures. A file names one of them as
# its end token, but a model may emit any.
_END_TEXTS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"}
)


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id. `model` is "gpt2" (byte-level BPE) or "llama" (SentencePiece's BPE)."""

    model: str
    tokens: tuple[str, ...]
    kinds: tuple[TokenKind, ...]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    end_ids: tuple[int, ...]  # whatever ends an answer, eos_id first
    add_bos: bool
    add_eos: bool

    def texts_of(self, *kinds: TokenKind) -> list[str]:
        return [text for text, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]


def read_vocabulary(header: GGUFHeader) -> Vocabulary:
    """Raises LoadError naming the key that is missing, wrong or not supported."""
    model = header.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise header.error("tokenizer", f"the model {model[:40]!r} is not supported; supported: gpt2, llama")
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = _kinds(header, len(tokens))
    _check_tokens(header, tokens)
    bos_id, eos_id, unk_id, pad_id, eot_id, eom_id = (
        _token_id(header, f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "unknown", "padding", "eot", "eom")
    )
    listed = [token_id for token_id in (eos_id, eot_id, eom_id) if token_id is not None]
    known = [
        token_id for token_id, text in enumerate(tokens) if text in _END_TEXTS and kinds[token_id] is TokenKind.CONTROL
    ]
    # SentencePiece's models expect a first token unless the file denies it.
    add_bos = model == "llama" or pretokenizer_of(header).add_bos
    return Vocabulary(
        model=model,
        tokens=tokens,
        kinds=kinds,
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=unk_id,
        pad_id=pad_id,
        end_ids=tuple(dict.fromkeys(listed + known)),
        add_bos=header.boolean("tokenizer.ggml.add_bos_token", add_bos) and bos_id is not None,
        add_eos=header.boolean("tokenizer.ggml.add_eos_token", False) and eos_id is not None,
    )


def _kinds(header: GGUFHeader, num_tokens: int) -> tuple[TokenKind, ...]:
    key = "tokenizer.ggml.token_type"
    values = header.integers(key)
    if len(values) != num_tokens:
        raise header.error(f"metadata {key}", f"has {len(values)} elements for {num_tokens} tokens")
    known = {kind.value: kind for kind in TokenKind}
    if unknown := set(values) - known.keys():
        raise header.error(f"metadata {key}", f"holds the unknown kind {min(unknown)}")
    return tuple(known[value] for value in values)


def _check_tokens(header: GGUFHeader, tokens: tuple[str, ...]) -> None:
    key = "metadata tokenizer.ggml.tokens"
    if not tokens:
        raise header.error(key, "is empty")
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(text for text in tokens if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        raise header.error(key, f"holds {twice[:40]!r} twice")
    if (longest := max(map(len, tokens))) > MAX_TOKEN_CHARS:
        raise header.error(key, f"holds a token of {longest} characters, more than {MAX_TOKEN_CHARS}")


def _token_id(header: GGUFHeader, key: str, num_tokens: int) -> int | None:
    if key not in header.metadata:
        return None
    token_id = header.integer(key)
    if not 0 <= token_id < num_tokens:
        raise header.error(f"metadata {key}", f"{token_id} is not a token of {num_tokens}")
    return token_id
