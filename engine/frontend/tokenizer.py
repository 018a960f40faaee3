"""Text to token ids and back, from a model folder's `tokenizer.json`, without torch or transformers."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import tokenizers
from tokenizers import decoders

from inferd.engine.errors import InvalidRequest, LoadError


class TokenizerSettings(msgspec.Struct):
    """What stands beside `tokenizer.json` in a model folder."""

    bos_token: str | None = None
    eos_token: str | None = None
    eos_token_ids: list[int] = []  # of generation_config.json
    chat_template: str | None = None  # jinja source


class Tokenizer:
    """One model's tokenizer; safe to use from several threads.

    `special_tokens` maps the text of each special token to its id. `eos_token_ids` joins the end-of-sequence ids of
    `generation_config.json` and of the tokenizer. `chat_template` is None for a base model.
    """

    def __init__(self, tokenizer_file: Path, settings: TokenizerSettings | None = None) -> None:
        settings = settings or TokenizerSettings()
        self._file = tokenizer_file
        self.backend = _load_backend(tokenizer_file)
        self._plain: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()
        added = self.backend.get_added_tokens_decoder()
        self._added = {token.content: token for token in added.values() if token.special}
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self._special_pattern = _alternatives(self._added)
        self._matches_after_normalizing = self.backend.normalizer is not None and any(
            token.normalized for token in self._added.values()
        )
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self.is_byte_level = isinstance(self.backend.decoder, decoders.ByteLevel)
        self.bos_token = settings.bos_token
        self.eos_token = settings.eos_token
        self.bos_token_id = self._id_of(settings.bos_token)
        own_eos_id = self._id_of(settings.eos_token)
        eos_ids = settings.eos_token_ids if own_eos_id is None else [*settings.eos_token_ids, own_eos_id]
        self.eos_token_ids = tuple(dict.fromkeys(eos_ids))
        self.chat_template = settings.chat_template

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Raises `LoadError` when the folder has no usable `tokenizer.json`."""
        folder = Path(folder)
        return cls(folder / "tokenizer.json", read_settings(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True, match_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` lets the tokenizer's own rules add, say, a beginning-of-sequence token.

        With `match_special_tokens=False` a special token that stands in `text` is encoded as ordinary text.
        Raises `InvalidRequest` for text that is not valid Unicode.
        """
        _check_unicode(text)
        backend = self.backend if match_special_tokens else self._plain_backend()
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_texts(
        self, text: str, second: str | None = None, *, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of one text or of a pair, as the tokenizer's own rules join it, and which text each token is of.

        Where that is more than `max_tokens`, texts lose their ends, the longer one of a pair first; what the rules add
        stays. Raises `InvalidRequest` for text that is not valid Unicode, or for a limit below what the rules add.
        """
        for given in (text, second or ""):
            _check_unicode(given)
        first = self.backend.encode(text, add_special_tokens=False)
        other = None if second is None else self.backend.encode(second, add_special_tokens=False)
        if max_tokens is not None:
            room = max_tokens - self.backend.num_special_tokens_to_add(other is not None)
            if room < 1:
                raise InvalidRequest(f"{max_tokens} tokens leave no room for text", param="truncate_prompt_tokens")
            keep, keep_other = _shares(len(first.ids), 0 if other is None else len(other.ids), room)
            first.truncate(keep)
            if other is not None:
                other.truncate(keep_other)
        joined = self.backend.post_process(first, other, add_special_tokens=True)
        return joined.ids, joined.type_ids

    def guard_text(self, text: str, guard: str) -> str:
        """Breaks every special token in a user's text by a `guard` character, for `encode_chat` to take out again.

        Apply it to each string of a user before the chat template sees it; `guard` is one character that occurs in
        none of them and that the template passes on as it is. An end that could become a special token together with
        what the template writes next is broken too.
        """
        cuts = {
            at + 1 if len(token) > 1 else at  # a token of one character is marked by a guard before it
            for token in self._added
            for at in _occurrences(text, token)
        }
        cuts.update(len(text) - length + 1 for length in self._dangling_lengths(text))
        edges = [0, *sorted(cuts), len(text)]
        return guard.join(text[start:end] for start, end in itertools.pairwise(edges))

    def encode_chat(self, rendered: str, guard: str) -> list[int]:
        """Token ids of a rendered chat template whose user strings went through `guard_text` with the same `guard`.

        Special ids come only from the template. Without a guard in it, the result is that of `encode` without added
        special tokens. With one, the text between special tokens is encoded piece by piece, as text.
        """
        if guard not in rendered and not self._matches_after_normalizing:
            return self.encode(rendered, add_special_tokens=False)
        _check_unicode(rendered)
        plain = self._plain_backend()
        ids: list[int] = []
        swallow_left = False
        for text, token in self._split(rendered, guard):
            swallow_right = token is not None and self._added[token].lstrip
            text = text.lstrip() if swallow_left else text
            text = text.rstrip() if swallow_right else text
            ids += plain.encode(text.replace(guard, ""), add_special_tokens=False).ids
            if token is not None:
                ids.append(self.special_tokens[token])
                swallow_left = self._added[token].rstrip
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Ids outside the vocabulary decode to nothing."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _split(self, rendered: str, guard: str) -> Iterator[tuple[str, str | None]]:
        """Text and the template's special token after it; None after the last text."""
        start = 0
        for match in self._special_pattern.finditer(rendered):
            token = match.group()
            if len(token) == 1 and rendered[: match.start()].endswith(guard):
                continue
            yield rendered[start : match.start()], token
            start = match.end()
        yield rendered[start:], None

    def _dangling_lengths(self, text: str) -> list[int]:
        longest = max(map(len, self._added), default=1)
        return [
            length
            for length in range(1, min(longest, len(text) + 1))
            if any(len(token) > length and token.startswith(text[-length:]) for token in self._added)
        ]

    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A second object, because `encode_special_tokens` is state that other threads would see. Made on first need:
        # it takes a third of a second for 150,000 tokens, and most chats never type a special token.
        with self._plain_lock:
            if self._plain is None:
                self._plain = _load_backend(self._file)
                self._plain.encode_special_tokens = True
            return self._plain

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


class _TokenText(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    bos_token: str | _TokenText | None = None
    eos_token: str | _TokenText | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def read_settings(folder: Path) -> TokenizerSettings:
    """Missing files leave defaults; a file that cannot be read raises `LoadError`."""
    own = _read_json(folder / "tokenizer_config.json", _TokenizerConfig)
    eos = _read_json(folder / "generation_config.json", _GenerationConfig).eos_token_id
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        template: str | None = template_file.read_text(encoding="utf-8")
    else:
        template = _default_template(own.chat_template)
    return TokenizerSettings(
        bos_token=_text_of(own.bos_token),
        eos_token=_text_of(own.eos_token),
        eos_token_ids=[eos] if isinstance(eos, int) else list(eos or []),
        chat_template=template,
    )


def _text_of(token: str | _TokenText | None) -> str | None:
    return token.content if isinstance(token, _TokenText) else token


def _default_template(templates: str | list[_NamedTemplate] | None) -> str | None:
    if isinstance(templates, list):
        return next((entry.template for entry in templates if entry.name == "default"), None)
    return templates


_File = TypeVar("_File", bound=msgspec.Struct)


def _read_json(path: Path, kind: type[_File]) -> _File:
    if not path.is_file():
        return kind()
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.parent.is_dir():
        raise LoadError(
            f"{path.parent} is not a folder: a model is the path of a folder with its weights and tokenizer"
        )
    if not path.is_file():
        raise LoadError(f"{path} is missing: a model folder needs a tokenizer.json to turn text into tokens")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise LoadError(f"{path} is not a tokenizer that can be read: {error}") from error
    # What whoever saved it used for batches of his own: here it would cut texts in silence, and fill up short ones.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _shares(length: int, other_length: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay within `room`: the longer one loses its end first."""
    if length + other_length <= room:
        return length, other_length
    shorter = min(length, other_length, room // 2)
    return (shorter, room - shorter) if length <= other_length else (room - shorter, shorter)


def _alternatives(tokens: dict[str, tokenizers.AddedToken]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def _occurrences(text: str, token: str) -> list[int]:
    """Where `token` starts in `text`, overlapping ones too."""
    found, at = [], text.find(token)
    while at >= 0:
        found.append(at)
        at = text.find(token, at + 1)
    return found


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has half of a surrogate pair at character {error.start}") from error
