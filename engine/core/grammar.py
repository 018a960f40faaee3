"""What scheduling and steps ask of whoever knows the grammars."""

from __future__ import annotations

from typing import Protocol

from inferd.engine.core.admission import AdmissionGate
from inferd.engine.core.output import GrammarBitmask, SchedulerOutput
from inferd.engine.params import SamplingParams
from inferd.engine.request import Request


class GrammarManager(AdmissionGate, Protocol):
    """Refuses admission while a request's grammar is compiled, and restricts what a step may sample.

    Requests without a grammar are told of too, and nothing is done for them.
    """

    def check(self, params: SamplingParams) -> None:
        """Raises `NotSupported` for a form that nobody can enforce, as far as that can be seen at once. Any thread."""
        ...

    def add(self, request: Request) -> None:
        """Begin to compile. Each request comes once, and leaves by `remove`."""
        ...

    def remove(self, request_id: str) -> None:
        """The request has ended, in whatever way."""
        ...

    def take_failures(self) -> dict[str, str]:
        """Waiting requests whose grammar cannot be compiled, and why; each is named once."""
        ...

    def must_wait(self, output: SchedulerOutput) -> bool:
        """Whether a row under a grammar is in this step whose newest token is still on its way from an earlier one.

        Then the step is launched all the same, and only its sampling waits for the results of those before it.
        """
        ...

    def bitmask(self, output: SchedulerOutput) -> GrammarBitmask | None:
        """For `Executor.sample_tokens`; None when no row of the step is restricted."""
        ...

    def accept(self, request: Request, token_id: int) -> str | None:
        """Move on by a sampled token, or say why the request cannot go on."""
        ...

    def has_ended(self, request: Request) -> bool:
        """Whether the last token was the end that its grammar asks for, whatever else would end it."""
        ...

    def close(self) -> None: ...
