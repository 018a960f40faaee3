"""What all ranks together gave back and had again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from inferd.engine.messages import SleepReport, WakeReport


def joint_sleep(by_rank: Iterable[Mapping[str, int]]) -> SleepReport:
    """From each rank's bytes by tag."""
    report = SleepReport()
    for released in by_rank:
        for tag, num_bytes in released.items():
            report.released_bytes[tag] = report.released_bytes.get(tag, 0) + num_bytes
    return report


def joint_wake(by_rank: Iterable[Mapping[str, Sequence[float]]]) -> WakeReport:
    """From each rank's (bytes, seconds) by tag. The slowest rank says how long a tag took."""
    report = WakeReport()
    for restored in by_rank:
        for tag, (num_bytes, seconds) in restored.items():
            report.restored_bytes[tag] = report.restored_bytes.get(tag, 0) + int(num_bytes)
            report.restored_s[tag] = max(report.restored_s.get(tag, 0.0), seconds)
    return report
