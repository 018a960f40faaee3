"""What a run of the GPU suite found, beside its yardsticks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from inferd.engine.bench.gpu_profile import StepParts
from inferd.engine.bench.gpu_suite import FLOOR, GPU_SUITE, PEER, PEER_READY_S, READY_TARGET_S
from inferd.engine.bench.gpu_timing import GpuResult
from inferd.engine.bench.report import table_line


@dataclass(frozen=True)
class GpuReport:
    machine: str
    settings: dict[str, object]
    ready_s: float | None  # from the start of the engine's process
    results: list[GpuResult]
    parts: list[StepParts]
    decisions: list[str]

    def as_json(self) -> str:
        known = {row.name: row for row in GPU_SUITE}
        fields = asdict(self)
        for result in fields["results"]:
            row = known[result["name"]]
            result |= {"counts": row.counts, "peer": row.peer, "target": row.target, "floor_s": row.floor_s}
        return json.dumps(fields | {"peer": PEER, "floor": FLOOR}, indent=2)

    def as_text(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        lines = [f"Llama-3.1-8B shapes, random weights, on {self.machine}", settings, *self.decisions, ""]
        if self.ready_s is not None:
            low, high = PEER_READY_S
            lines.append(f"ready after {self.ready_s:.1f} s (peer {low:.0f}-{high:.0f}, target {READY_TARGET_S:.0f})")
        lines += [f"peer: {PEER}", ""] if self.results else []
        lines += self._table() if self.results else []
        lines += ["", *self._parts_table()] if self.parts else []
        return "\n".join(lines)

    def _table(self) -> list[str]:
        header = ["row", "counts", "tok/s", "s", "peer tok/s", "ratio to peer", "target", "of target", "of floor"]
        lines = [table_line(header), table_line(["---"] * len(header))]
        known = {row.name: row for row in GPU_SUITE}
        for result in self.results:
            row, speed = known[result.name], result.tokens_per_s
            low, high = row.peer
            cells = [row.name, row.counts, f"{speed:.0f}", f"{result.seconds:.2f}", f"{low:.0f}-{high:.0f}"]
            cells += [f"{2 * speed / (low + high):.2f}", f"{row.target:.0f}", f"{speed / row.target:.2f}"]
            lines.append(table_line([*cells, f"{row.floor_s / result.seconds:.2f}"]))
        return lines

    def _parts_table(self) -> list[str]:
        header = ["rows", "steps", *(f"{name} ms" for name in StepParts.NAMES), "step ms"]
        lines = [table_line(header), table_line(["---"] * len(header))]
        for parts in self.parts:
            cells = [str(parts.num_rows), str(parts.num_steps), *(f"{part:.3f}" for part in parts.medians_ms)]
            lines.append(table_line([*cells, f"{sum(parts.medians_ms):.3f}"]))
        return lines
