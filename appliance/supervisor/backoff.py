"""How long to wait before an engine is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    first_s: float = 0.2
    longest_s: float = 30.0
    healthy_after_s: float = 60.0  # an engine that lived this long starts the series anew

    def delay_s(self, num_failures: int) -> float:
        """Doubles from `first_s` up to `longest_s`; `num_failures` in a row, 1 for the first."""
        doublings = min(max(num_failures - 1, 0), 32)
        return min(self.first_s * 2.0**doublings, self.longest_s)

    def count_failure(self, num_failures: int, lived_s: float) -> int:
        """The failures in a row after one more, by an engine that was ready for `lived_s`."""
        return 1 if lived_s >= self.healthy_after_s else num_failures + 1
