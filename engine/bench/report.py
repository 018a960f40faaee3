"""What a run found, as a Markdown table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from inferd.engine.bench.copying import CopyingGain
from inferd.engine.bench.feed_cost import FeedCost
from inferd.engine.bench.quality import Quality
from inferd.engine.bench.timing import Row


@dataclass(frozen=True)
class Report:
    machine: str
    model: str
    dtype: str
    load_s: float  # process start to ready
    rows: list[Row]
    quality: Quality | None
    decisions: list[str]
    feed: FeedCost | None = None
    copying: CopyingGain | None = None

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        lines = [f"{self.model}, {self.dtype}, on {self.machine}", f"start to ready: {self.load_s:.1f} s", ""]
        lines += self._table() if self.rows else []
        if self.feed is not None:
            lines += ["", str(self.feed)]
        if self.copying is not None:
            lines += ["", str(self.copying)]
        if self.quality is not None:
            q = self.quality
            lines += [
                "",
                f"{self.dtype} against float32 over {q.tokens} tokens: "
                f"mean KL {q.mean_kl:.2e} nats, top-1 agreement {q.top1_agreement:.2%}",
            ]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        peers = list(dict.fromkeys(row.peer for row in self.rows))
        others = peers[1:]
        header = ["workload", *(f"{peer} tok/s" for peer in peers), *(f"ratio to {peer}" for peer in others)]
        lines = [table_line(header), table_line(["---"] * len(header))]
        for workload in dict.fromkeys(row.workload for row in self.rows):
            speed = {row.peer: row.tokens_per_s for row in self.rows if row.workload == workload}
            ours = speed[peers[0]]
            cells = [
                workload,
                *(f"{speed[peer]:.1f}" for peer in peers),
                *(f"{ours / speed[peer]:.2f}" for peer in others),
            ]
            lines.append(table_line(cells))
        return lines


def table_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
