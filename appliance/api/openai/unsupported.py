"""Fields of the OpenAI API and vLLM's extras that this server knows and does not do.

Unknown fields are ignored. A known one that asks for something is refused by name: an answer that silently lacks what
was asked for is worse than none. Null, and the values listed here, ask for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferd.engine.errors import InvalidRequest, NotSupported

_ZERO = (0,)
_ONE = (1,)
_NO = (False,)
_EMPTY_LIST: tuple[Any, ...] = ([],)

_BOTH: dict[str, tuple[Any, ...]] = {
    "length_penalty": _ONE,
    "use_beam_search": _NO,
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "return_token_ids": _NO,
    "return_tokens_as_token_ids": _NO,
    "priority": _ZERO,
    "detokenize": (True,),
}

CHAT: dict[str, tuple[Any, ...]] = _BOTH | {
    "functions": _EMPTY_LIST,
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "documents": _EMPTY_LIST,
    "echo": _NO,
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": _NO,
}

COMPLETIONS: dict[str, tuple[Any, ...]] = _BOTH | {
    "suffix": ("",),
}

_POOLING: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "priority": _ZERO,
    "mm_processor_kwargs": (),
}

EMBEDDINGS: dict[str, tuple[Any, ...]] = _POOLING | {
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}

SCORES: dict[str, tuple[Any, ...]] = _POOLING

# Of chat_template_kwargs: variables that cannot do harm.
TEMPLATE_OPTIONS = {"enable_thinking": bool, "thinking": bool, "reasoning_effort": str}
EFFORTS = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


def refuse_unsupported(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `NotSupported` for the first field of `table` that asks for something."""
    for name, harmless in table.items():
        value = body.get(name)
        if value is not None and not any(_same(value, accepted) for accepted in harmless):
            shown = repr(value) if isinstance(value, bool | int | float | str) else "this value"
            allowed = f"leave it out or send {harmless[0]!r}" if harmless else "leave it out"
            raise NotSupported(f"{name}: {shown[:60]} is not supported; {allowed}", param=name)


def template_options(asked: Mapping[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Variables of the template; those named by the client itself win over what its `reasoning_effort` stands for.

    Templates know two switches for reasoning and three degrees of it, and pass over what they do not know.
    """
    for name, value in (asked or {}).items():
        kind = TEMPLATE_OPTIONS.get(name)
        if kind is None or not isinstance(value, kind):
            known = ", ".join(f"{option} ({_KIND_NAMES[kind]})" for option, kind in TEMPLATE_OPTIONS.items())
            raise NotSupported(
                f"chat_template_kwargs: {name[:60]!r} is not supported; there are {known}",
                param="chat_template_kwargs",
            )
    if effort is None:
        return dict(asked or {})
    if effort not in EFFORTS:
        text = f"reasoning_effort: {effort[:40]!r} is none of {', '.join(EFFORTS)}"
        raise InvalidRequest(text, param="reasoning_effort")
    degree = EFFORTS[effort]
    variables: dict[str, Any] = {"enable_thinking": degree is not None, "thinking": degree is not None}
    if degree is not None:
        variables["reasoning_effort"] = degree
    return variables | dict(asked or {})


_KIND_NAMES = {bool: "true or false", str: "a string"}


def _same(value: Any, accepted: Any) -> bool:
    """Equal and of a kind: 0.0 is 0, but neither False nor "0" is."""
    return isinstance(value, bool) is isinstance(accepted, bool) and bool(value == accepted)
