"""How text is cut before byte-level BPE, by the name in `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from inferd.engine.loader.gguf_header import GGUFHeader

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    pattern: str | None = None  # None: GPT-2's own
    single_digits: bool = False
    nfc: bool = False  # text is brought to Unicode's composed form first
    ignore_merges: bool = False  # a piece that is a token as a whole stays whole, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise

    def build(self) -> pre_tokenizers.PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        return pre_tokenizers.Sequence([*steps, byte_level])


_LLAMA3_TOKENIZER = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(),
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "starcoder": PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3_TOKENIZER,
    "llama3": _LLAMA3_TOKENIZER,
    "llama-v3": _LLAMA3_TOKENIZER,
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
}


def pretokenizer_of(header: GGUFHeader) -> PreTokenizer:
    """Raises LoadError for a name that is not known: a wrong cut gives wrong ids without any other sign."""
    name = header.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise header.error("tokenizer.ggml.pre", f"{name[:40]!r} is not supported; supported: {known}")
    return PRE_TOKENIZERS[name]
