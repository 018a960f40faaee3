"""What prompt lookup brings where a text is copied: the same work with and without it, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from inferd.engine.config import EngineArgs, SpeculativeArgs
from inferd.engine.frontend.llm import LLM
from inferd.engine.params import SamplingParams

ROUNDS = 3  # of each kind
BEGUN_TOKENS = 16  # of the text, that the prompt ends with
TEXT = """The lighthouse at Carrow Point was built in 1811, after two ships had been lost on the rocks in one winter. \
Its lamp burned whale oil at first, and the keeper climbed one hundred and forty steps three times each night to trim \
the wick. In 1874 the oil gave way to paraffin, and in 1923 to electricity; the last keeper, a woman named Agnes Rowe, \
left the tower in 1961, when a clockwork timer took over her duties. She lived in the village until her death, and \
every evening she walked to the end of the pier to see whether the light came on."""


@dataclass(frozen=True)
class CopyingGain:
    plain_tokens_per_s: float
    guessed_tokens_per_s: float
    copied_share: float  # of the output, that is the text
    accepted_share: float  # of draft tokens, that stood
    is_same: bool  # the answer with guesses, as that without; rounding may differ with the number of rows in a step

    @property
    def ratio(self) -> float:
        return self.guessed_tokens_per_s / self.plain_tokens_per_s

    def __str__(self) -> str:
        return (
            f"copying a text: {self.guessed_tokens_per_s:.1f} tok/s with n-gram guesses, {self.plain_tokens_per_s:.1f} "
            f"without, ratio {self.ratio:.2f}; {self.accepted_share:.0%} of the guesses stood, {self.copied_share:.0%} "
            f"of the output is the text, {'the same' if self.is_same else 'not the same'} with guesses and without"
        )


def measure_copying(args: EngineArgs, progress: Callable[[str], None]) -> CopyingGain:
    """One request at a time: a text twice, and its beginning, after which the model goes on as it was.

    Raises RuntimeError for a model without a tokenizer.
    """
    guesses = SpeculativeArgs("ngram")
    with _start(args, None) as plain, _start(args, guesses) as guessing:
        tokenizer = plain.tokenizer
        if tokenizer is None:
            raise RuntimeError(f"{args.model} has no tokenizer: the copying task is a text")
        text = tokenizer.encode(TEXT, add_special_tokens=False)
        prompt, rest = text * 2 + text[:BEGUN_TOKENS], text[BEGUN_TOKENS:]
        engines = {"plain": plain, "n-gram": guessing}
        best: dict[str, float] = dict.fromkeys(engines, float("inf"))
        answers: dict[str, list[int]] = {}
        for round_ in range(ROUNDS):
            for name in engines if round_ % 2 else reversed(engines):
                seconds, answers[name] = _one_round(engines[name], prompt, len(rest))
                best[name] = min(best[name], seconds)
                progress(f"copying, {name}: {len(rest) / seconds:.1f} tok/s")
        stats = guessing.stats()
    return CopyingGain(
        len(rest) / best["plain"],
        len(rest) / best["n-gram"],
        sum(a == b for a, b in zip(answers["n-gram"], rest, strict=True)) / len(rest),
        sum(stats.accepted) / max(sum(stats.drafted), 1),
        answers["n-gram"] == answers["plain"],
    )


def _start(args: EngineArgs, speculative: SpeculativeArgs | None) -> LLM:
    return LLM(args.model, in_process=True, dtype=args.dtype, kernels=args.kernels, speculative=speculative)


def _one_round(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
    """Seconds and tokens; nothing of the prompt is cached."""
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    began = time.perf_counter()
    (output,) = llm.generate([prompt], params, progress=False)
    return time.perf_counter() - began, output.outputs[0].token_ids
