"""How long a request's next draft is to be: a pure function of what became of those before, and of the load.

A draft token costs one more row in a step, whether it stands or not. With r requests in a step whose fixed cost is that
of h rows, a row costs r / (r + h) of what a token costs without drafts; so drafts pay while a larger share of their
tokens stands. They grow and shrink with that share as it was of late, and where it is too small there are none for a
while, longer each time, after which a short one asks whether things have changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

WEIGHT = 0.3  # of the newest draft in the running share
LEAST_SHARE = 0.2  # below it drafts are not worth their trouble, however cheap a row is
PROBE_TOKENS = 2
FIRST_PAUSE = 16  # output tokens
LONGEST_PAUSE = 256


@dataclass(frozen=True, slots=True)
class Confidence:
    """In the drafts of one request."""

    share: float = 1.0  # of draft tokens that stood, a running mean over drafts
    is_probe: bool = False  # the next draft is the first one after a pause
    paused_until: int = 0  # output tokens at which drafts are tried again
    next_pause: int = FIRST_PAUSE


def break_even_share(num_rows: int, num_fixed_rows: int) -> float:
    """Of draft tokens, what must stand; `num_rows` requests are in a step whose fixed cost is that of so many rows."""
    return max(num_rows / (num_rows + num_fixed_rows), LEAST_SHARE)


def draft_length(confidence: Confidence, longest: int, num_output_tokens: int) -> int:
    """0 during a pause."""
    if num_output_tokens < confidence.paused_until:
        return 0
    if confidence.is_probe:
        return min(PROBE_TOKENS, longest)
    return max(1, round(confidence.share * longest))


def after_check(
    confidence: Confidence, num_drafts: int, num_accepted: int, num_output_tokens: int, break_even: float
) -> Confidence:
    """`num_accepted` of `num_drafts` > 0 tokens stood; the request had `num_output_tokens` before them."""
    share = (1 - WEIGHT) * confidence.share + WEIGHT * num_accepted / num_drafts
    if share < break_even:
        pause = confidence.next_pause
        # What the pause ends with is the share at which one more failure is one too many.
        return Confidence(break_even, True, num_output_tokens + pause, min(2 * pause, LONGEST_PAUSE))
    is_good = share >= (1 + break_even) / 2
    return replace(
        confidence, share=share, is_probe=False, next_pause=FIRST_PAUSE if is_good else confidence.next_pause
    )
