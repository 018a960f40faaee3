"""What is wrong with a body, in words for whoever wrote it."""

from __future__ import annotations

import re

import msgspec

_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_KIND = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<found>[^`]+)`")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def in_plain_words(error: msgspec.ValidationError) -> tuple[str, str | None]:
    """(a sentence without its full stop, the field that is to blame where it is known)."""
    match = _WHERE.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    if missing := _MISSING.fullmatch(what):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return f"{name} is missing", name
    if unknown := _UNKNOWN.fullmatch(what):
        name = f"{path}.{unknown['name']}" if path else unknown["name"]
        return f"{name[:200]} is not a field that is known here", name[:200]
    subject = path or "the body"
    if kind := _KIND.fullmatch(what):
        found = "a boolean" if kind["found"] == "bool" else _WORDS.get(kind["found"], kind["found"])
        return f"{subject} must be {_kinds(kind['wanted'])}, not {found}", path or None
    return f"{subject}: {what}", path or None


def _kinds(text: str) -> str:
    """`int | null` → "a whole number": who sends a wrong value did not mean to send none."""
    names = [name for name in text.split(" | ") if name != "null"] or ["null"]
    words = [_WORDS.get(name, name) for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
