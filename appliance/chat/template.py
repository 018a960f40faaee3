"""A model's chat template, in jinja2's immutable sandbox with limits on work and output.

The template comes with the model and is not trusted: it cannot reach attributes of Python objects, it stops after
`MAX_RENDER_S`, and what it builds is bounded. The time limit is looked at whenever the template calls, filters, reads
an attribute or multiplies, which every loop that does anything has to. These limits say what went wrong; the ones that
hold whatever a template thinks of are those of the process that it is rendered in (`render_child.py`).
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferd.engine.errors import InvalidRequest

MAX_RENDER_S = 1.0
MAX_OUTPUT_CHARS = 4 * 2**20
MAX_NUMBER = 2**20  # as an argument of a call or filter, and as the length of what `*` builds
WIDE_FORMAT = re.compile(r"[0-9]{5}|\*")


class TemplateRefused(InvalidRequest):
    """The template raised an error about these messages."""

    code = "invalid_value"

    def __init__(self, cause: str) -> None:
        super().__init__(f"The chat template of this model refuses these messages: {cause}", param="messages")
        self.cause = cause


class ChatTemplate:
    """Compiled once, safe to render from several threads. Raises `jinja2.TemplateSyntaxError` when constructed."""

    def __init__(self, source: str) -> None:
        # A template keeps the environment that compiled it, and the clock belongs to one rendering: so the code is
        # kept, and each rendering gets an environment of its own.
        self._code = _Sandbox().compile(source)

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Raises `TemplateRefused`."""
        sandbox = _Sandbox()
        template = jinja2.Template.from_code(sandbox, self._code, sandbox.make_globals(None))
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in template.generate(messages=messages, add_generation_prompt=True, **variables):
                pieces.append(piece)
                num_chars += len(piece)
                sandbox.check_clock()
                if num_chars > MAX_OUTPUT_CHARS:
                    raise TemplateRefused("its output is too long")
        except jinja2.TemplateError as error:
            raise TemplateRefused((error.message or type(error).__name__)[:500]) from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            if isinstance(error, TemplateRefused):
                raise
            raise TemplateRefused(f"a {type(error).__name__} in the template") from None
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self._deadline = time.monotonic() + MAX_RENDER_S
        self.filters = _FILTERS
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def check_clock(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateRefused(f"it takes longer than {MAX_RENDER_S:g} s")

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_clock()
        _refuse_large_numbers(args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _refuse_wide_format(value.__self__)
        return wrapped

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_clock()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.check_clock()
        if operator == "**":
            raise TemplateRefused("it uses powers")
        if operator == "%" and isinstance(left, str):
            _refuse_wide_format(left)
        for sequence, factor in ((left, right), (right, left)):
            if isinstance(factor, int) and hasattr(sequence, "__len__") and len(sequence) * factor > MAX_NUMBER:
                raise TemplateRefused("it repeats something too often")
        return super().call_binop(context, operator, left, right)


def _refuse_large_numbers(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(value, int) and value > MAX_NUMBER for value in (*args, *kwargs.values())):
        raise TemplateRefused(f"it passes a number above {MAX_NUMBER}")


def _refuse_wide_format(pattern: str) -> None:
    if WIDE_FORMAT.search(pattern):
        raise TemplateRefused("it formats something too wide")


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    num_own = 2 if hasattr(function, "jinja_pass_arg") else 1  # the environment, if it is passed, and the value

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _refuse_large_numbers(args[num_own:], kwargs)
        return function(*args, **kwargs)

    return guarded


def _format(pattern: str, *args: Any) -> str:
    _refuse_wide_format(pattern)
    return pattern % args


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, separators: tuple[str, str] | None = None, **_: Any) -> str:
    """Without jinja's HTML escapes, which models have never seen."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


_FILTERS = {name: _guarded(function) for name, function in FILTERS.items()} | {"tojson": _to_json, "format": _format}
