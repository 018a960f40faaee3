"""Control calls: a name and arguments in, one reply out, at once or later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inferd.engine.messages import Call, CallReply


@dataclass(frozen=True)
class Later:
    """What a function returns whose result has to wait: `result` is called once, when `is_ready`."""

    is_ready: Callable[[], bool]
    result: Callable[[], Any]


class CallDesk:
    """Nothing of the engine can be reached by name but these functions. What goes wrong in one goes to its caller."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions
        self._later: list[tuple[Call, Later]] = []

    @property
    def has_ready(self) -> bool:
        return any(later.is_ready() for _, later in self._later)

    def answer(self, call: Call) -> CallReply | None:
        """None: `take_ready` will have the reply."""
        function = self._functions.get(call.method)
        if function is None:
            names = ", ".join(sorted(self._functions))
            return CallReply(call.call_id, error=f"unknown call {call.method!r}; there are: {names}")
        return self._reply(call, lambda: function(*call.args))

    def take_ready(self) -> CallReply | None:
        """One of those whose result was waited for, if it is there now."""
        for index, (call, later) in enumerate(self._later):
            if later.is_ready():
                del self._later[index]
                return self._reply(call, later.result)
        return None

    def _reply(self, call: Call, work: Callable[[], Any]) -> CallReply | None:
        try:
            result = work()
        except Exception as error:
            return CallReply(call.call_id, error=f"{call.method}: {type(error).__name__}: {error}")
        if isinstance(result, Later):
            if not result.is_ready():
                self._later.append((call, result))
                return None
            return self._reply(call, result.result)
        return CallReply(call.call_id, result=result)
