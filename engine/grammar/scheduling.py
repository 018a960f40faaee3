"""The grammars of an engine's requests, as its scheduler and its steps ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.core.admission import Refusal, WaitReason
from inferd.engine.core.output import GrammarBitmask, SchedulerOutput
from inferd.engine.errors import NotSupported
from inferd.engine.grammar.backends import refusal
from inferd.engine.grammar.manager import GrammarManager, GrammarState
from inferd.engine.grammar.spec import FIELD
from inferd.engine.params import SamplingParams
from inferd.engine.request import Request


class StructuredRequests:
    """Implements `core.grammar.GrammarManager`. `check` may be called from any thread, the rest from the engine's."""

    def __init__(self, manager: GrammarManager, backends: Sequence[str]) -> None:
        self._manager = manager
        self._backends = tuple(backends)
        self._requests: dict[str, Request] = {}  # those under a grammar
        self._failures: dict[str, str] = {}

    def check(self, params: SamplingParams) -> None:
        """Raises `NotSupported` for a form that can be seen to be beyond every backend, naming the keyword."""
        spec = params.structured_output
        if spec is None:
            return
        said = [refusal(name, spec) for name in self._backends]
        if None not in said:
            reasons = "; ".join(dict.fromkeys(filter(None, said))) or "no grammar backend is installed"
            raise NotSupported(f"{spec.kind.value} cannot be enforced: {reasons}", param=FIELD)

    def add(self, request: Request) -> None:
        spec = request.structured_output
        if spec is None:
            return
        self._requests[request.request_id] = request
        self._manager.add(
            request.request_id,
            spec,
            request.token_ids,
            min_tokens=request.min_tokens,
            stop_token_ids=request.params.stop_token_ids,
        )

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._failures.pop(request_id, None)
        self._manager.remove(request_id)

    def refusal(self, request: Request) -> Refusal | None:
        if request.structured_output is None:
            return None
        state = self._manager.state(request.request_id)
        if state is GrammarState.READY:
            return None
        if state is GrammarState.FAILED:
            self._failures[request.request_id] = self._manager.error(request.request_id) or ""
        return Refusal(WaitReason.GRAMMAR_COMPILING)

    def take_failures(self) -> dict[str, str]:
        failures, self._failures = self._failures, {}
        return failures

    def must_wait(self, output: SchedulerOutput) -> bool:
        return any(request.num_output_placeholders > 1 for request in self._scheduled(output))

    def bitmask(self, output: SchedulerOutput) -> GrammarBitmask | None:
        """Of the requests that the step samples: those that have caught up with their known tokens in it."""
        sampled = [request.request_id for request in self._scheduled(output) if request.num_output_placeholders > 0]
        if not sampled:
            return None
        rows = [(name, output.drafts.get(name, ())) for name in sampled]
        names = [name for name, drafts in rows for _ in range(1 + len(drafts))]
        return GrammarBitmask(names, self._manager.bitmask(rows))

    def accept(self, request: Request, token_id: int) -> str | None:
        if request.structured_output is None:
            return None
        return self._manager.accept(request.request_id, [token_id]).error

    def has_ended(self, request: Request) -> bool:
        return request.structured_output is not None and self._manager.has_ended(request.request_id)

    def close(self) -> None:
        self._manager.close()

    def _scheduled(self, output: SchedulerOutput) -> list[Request]:
        """Under a grammar, and still here: one that came since may have the id of one that left."""
        if not self._requests:
            return []
        found = (self._requests.get(request_id) for request_id in output.num_scheduled_tokens)
        return [request for request in found if request is not None and request.added_at_step < output.step]
