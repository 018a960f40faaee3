"""Whether an output has begun to repeat itself."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.params import RepetitionDetection


def ends_in_repetition(token_ids: Sequence[int], num_output_tokens: int, wanted: RepetitionDetection) -> bool:
    """Whether the last `num_output_tokens` of `token_ids` end in enough equal patterns, one right after the other."""
    for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1):
        length = size * wanted.min_count
        if length > num_output_tokens:
            return False  # and longer patterns even less
        if token_ids[-1] != token_ids[-1 - size]:
            continue  # most outputs end here, at no cost
        end = len(token_ids)
        if token_ids[end - length : end - size] == token_ids[end - length + size : end]:  # equal to itself, shifted
            return True
    return False
