"""All logits processors of one batch, in the order in which they work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from inferd.engine.sampling.builtin import AllowedTokens, BadWords, LogitBias, MinTokens
from inferd.engine.sampling.penalties import Penalties
from inferd.engine.sampling.plugins import ProcessorFactory
from inferd.engine.sampling.processors import BatchUpdate, LogitsProcessor, ProcessorContext, StepRows


class ProcessorChain:
    """Before temperature: allowed tokens, bad words, min_tokens, biases, those not built in, penalties.

    After temperature, and not for greedy rows: those not built in that are argmax-invariant. (min_p, the one of that
    kind that is built in, works on probabilities inside the sampler.)
    """

    def __init__(self, context: ProcessorContext, factories: Sequence[ProcessorFactory] = ()) -> None:
        others = [factory(context) for factory in factories]
        self._before: list[LogitsProcessor] = [
            AllowedTokens(),
            BadWords(),
            MinTokens(context),
            LogitBias(),
            *(processor for processor in others if not processor.is_argmax_invariant()),
            Penalties(),
        ]
        self._after = [processor for processor in others if processor.is_argmax_invariant()]

    def update_state(self, update: BatchUpdate) -> None:
        if update:
            for processor in (*self._before, *self._after):
                processor.update_state(update)

    def edits(self, step: StepRows) -> LogitsEdits:
        """What the step's rows ask for now."""
        return LogitsEdits(
            step,
            [processor for processor in self._before if processor.is_active()],
            [processor for processor in self._after if processor.is_active()],
        )


class LogitsEdits:
    """The changes that one step's logits undergo."""

    def __init__(
        self, step: StepRows, before: Sequence[LogitsProcessor] = (), after: Sequence[LogitsProcessor] = ()
    ) -> None:
        self._step = step
        self._before = before
        self._after = after

    @property
    def for_all_rows(self) -> bool:
        """Whether greedy rows are concerned too."""
        return bool(self._before)

    def before_temperature(self, logits: Tensor) -> Tensor:
        """logits[m, vocab] f32 of all rows of the step."""
        for processor in self._before:
            logits = processor.apply(logits, self._step)
        return logits

    def after_temperature(self, logits: Tensor, rows: Sequence[int] | None) -> Tensor:
        """logits[r, vocab] f32 of the step's rows that are sampled; None for all of them."""
        if self._after:
            step = self._step if rows is None else self._step.take(np.array(rows, np.intp))
            for processor in self._after:
                logits = processor.apply(logits, step)
        return logits
