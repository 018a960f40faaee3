"""What a caller may ask of the form of an output."""

from __future__ import annotations

import enum
import json
import re
from typing import Any, cast

import msgspec

from inferd.engine.errors import InvalidRequest, check_unicode
from inferd.engine.grammar.schema import check_schema

MAX_SPEC_BYTES = 64 << 10  # as JSON or source text; what agents send as tool schemas stays far below
MAX_CHOICES = 10_000
FIELD = "structured_output"


class GrammarKind(enum.Enum):
    """The fields of `StructuredOutput`, of which exactly one is set."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class StructuredOutput(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The form that an output must have; valid once constructed.

    Exactly one of the first six fields is set. `json_schema` and `structural_tag` also take the parsed JSON and keep
    its text, with the order of keys: properties come out in that order. A `grammar` is EBNF in the GBNF notation, with
    a rule `root ::=`, or Lark with a rule `start:`. A `structural_tag` leaves text free until a trigger occurs in it:
    `{"triggers": [...], "structures": [{"begin": ..., "schema": ..., "end": ...}]}`. With a `separator` in place of the
    triggers nothing is free: the output is one or more structures with that between them, just one if `once` is true,
    all of them between `prefix` and `suffix`, which may be left out; or it is a value of `or_schema`, if that is given.

    `reasoning` is the pair of token ids that open and close a block of reasoning. Inside such a block, whether the
    prompt or the output opened it, nothing is constrained except that the output may not end there.

    Raises `InvalidRequest` from the constructor (a `msgspec.ValidationError` when decoded), naming the keyword.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    reasoning: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.json_schema = _as_text("json_schema", self.json_schema)
        self.structural_tag = _as_text("structural_tag", self.structural_tag)
        given = [kind.value for kind in GrammarKind if getattr(self, kind.value) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(kind.value for kind in GrammarKind)
            raise _wrong(f"exactly one of {names} must be set, got {' and '.join(given) or 'none of them'}")
        _CHECKS[self.kind](self)

    @property
    def kind(self) -> GrammarKind:
        return next(kind for kind in GrammarKind if getattr(self, kind.value) not in (None, False))

    @property
    def key(self) -> str:
        """What two outputs that share a compiled grammar have in common."""
        return f"{self.kind.value}:{self.source}"

    @property
    def source(self) -> str:
        """The grammar as text, in the notation of its kind."""
        if self.kind is GrammarKind.CHOICE:
            return json.dumps(self.choice, ensure_ascii=False)
        return str(getattr(self, self.kind.value))

    @property
    def is_ebnf(self) -> bool:
        """Whether `grammar` is EBNF; else it is Lark."""
        return self.grammar is not None and _EBNF_ROOT.search(self.grammar) is not None


_EBNF_ROOT = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_EDGES = ("separator", "prefix", "suffix")
_LARK_START = re.compile(r"^\s*start\s*:", re.MULTILINE)


def _as_text(name: str, value: object) -> str | None:
    """JSON as text, whether it came parsed or not."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(f"{name} is no JSON: {error}") from error


def _check_json_schema(spec: StructuredOutput) -> None:
    text = _sized("json_schema", spec.json_schema)
    schema = _parse("json_schema", text)
    if schema in ({}, True):
        raise _wrong("json_schema: the schema allows anything; describe a value, or ask for json_object")
    check_schema(schema)


def _check_regex(spec: StructuredOutput) -> None:
    _sized("regex", spec.regex)


def _check_choice(spec: StructuredOutput) -> None:
    choices = cast(list[object], spec.choice)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise _wrong("choice must be a list of one or more non-empty strings")
    if len(choices) > MAX_CHOICES:
        raise _wrong(f"choice: at most {MAX_CHOICES} strings, got {len(choices)}")
    if len(set(choices)) != len(choices):
        raise _wrong("choice: the same string stands twice in the list")
    _sized("choice", "".join(cast(list[str], choices)))


def _check_grammar(spec: StructuredOutput) -> None:
    text = _sized("grammar", spec.grammar)
    if not (_EBNF_ROOT.search(text) or _LARK_START.search(text)):
        raise _wrong("grammar: no rule to start from; EBNF needs `root ::= ...`, Lark needs `start: ...`")


def _check_structural_tag(spec: StructuredOutput) -> None:
    tag = _parse("structural_tag", _sized("structural_tag", spec.structural_tag))
    if not isinstance(tag, dict):
        raise _wrong("structural_tag must be an object with triggers and structures")
    triggers, structures = tag.get("triggers"), tag.get("structures")
    if "separator" in tag:
        _check_exact_tag(tag)
    else:
        _strings("structural_tag.triggers", triggers)
    if not isinstance(structures, list) or not structures:
        raise _wrong("structural_tag.structures must be a list of one or more objects")
    for index, structure in enumerate(structures):
        _check_structure(f"structural_tag.structures[{index}]", structure, cast(list[str] | None, triggers))


def _check_exact_tag(tag: dict[str, Any]) -> None:
    unknown = set(tag) - {"separator", "structures", "prefix", "suffix", "once", "or_schema"}
    if unknown:
        raise _wrong(f"structural_tag with a separator cannot have {sorted(unknown)[0][:60]!r}")
    _strings("structural_tag.separator, .prefix and .suffix", [tag[name] for name in _EDGES if name in tag])
    if not isinstance(tag.get("once", False), bool):
        raise _wrong("structural_tag.once must be true or false")
    if "or_schema" in tag:
        check_schema(tag["or_schema"])


def _check_structure(where: str, structure: Any, triggers: list[str] | None) -> None:
    if not isinstance(structure, dict) or set(structure) != {"begin", "schema", "end"}:
        raise _wrong(f"{where} must have begin, schema and end, and nothing else")
    _strings(f"{where}.begin and .end", [structure["begin"], structure["end"]])
    if triggers is not None and sum(structure["begin"].startswith(trigger) for trigger in triggers) != 1:
        raise _wrong(f"{where}.begin must begin with exactly one of the triggers")
    check_schema(structure["schema"])


_CHECKS = {
    GrammarKind.JSON_SCHEMA: _check_json_schema,
    GrammarKind.JSON_OBJECT: lambda _: None,
    GrammarKind.REGEX: _check_regex,
    GrammarKind.CHOICE: _check_choice,
    GrammarKind.GRAMMAR: _check_grammar,
    GrammarKind.STRUCTURAL_TAG: _check_structural_tag,
}


def _strings(where: str, values: Any) -> None:
    if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
        raise _wrong(f"{where} must be non-empty strings")


def _sized(name: str, text: str | None) -> str:
    text = text or ""
    if not text.strip():
        raise _wrong(f"{name} is empty")
    check_unicode(FIELD, text)
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise _wrong(f"{name} has more than {MAX_SPEC_BYTES >> 10} KB")
    return text


def _parse(name: str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _wrong(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise _wrong(f"{name} is no JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param=FIELD)
