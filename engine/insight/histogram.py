"""Counts of tokens by size class, cheap enough for every step."""

from __future__ import annotations

from bisect import bisect_left

STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds, included; one class more holds what is above."""


def no_counts() -> list[int]:
    return [0] * (len(STEP_TOKENS_BUCKETS) + 1)


def count(counts: list[int], num_tokens: int) -> None:
    counts[bisect_left(STEP_TOKENS_BUCKETS, num_tokens)] += 1
