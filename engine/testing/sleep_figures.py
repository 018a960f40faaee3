"""What an engine's process holds in each state of sleep, as the system counts it; in a process that does nothing else.

Run by `python -m` with a model folder, `EngineArgs` fields as JSON and a number of nights; prints one line of JSON. The
engine computes in this process, and its KV cache is written all over before it is measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from inferd.engine.config import EngineArgs
from inferd.engine.core.step import EngineCore
from inferd.engine.executor.uniproc import UniProcExecutor
from inferd.engine.messages import AddRequest, Call
from inferd.engine.params import SamplingParams
from inferd.engine.resolve import resolve

PROMPT = list(range(40, 104))


def resident_bytes() -> int:
    """Pages in main memory, also those of files."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "Rss":
            return int(amount.split()[0]) << 10
    raise RuntimeError("/proc/self/smaps_rollup has no Rss")


class Measured:
    """One engine, measured."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        self.fresh = resident_bytes()
        config = resolve(EngineArgs(folder, device="cpu", **options))
        self._executor = UniProcExecutor(config)
        self._core = EngineCore(config, self._executor)
        self.answer = self.ask_for_tokens()
        self.held = self.call("memory")[0]

    def awake(self) -> int:
        for cache in self._executor.worker.kv_caches.values():
            cache.fill_(1)
        return resident_bytes()

    def asleep(self, level: int) -> int:
        self.call("sleep", level)
        return resident_bytes()

    def wake(self) -> dict[str, Any]:
        """The report, once the answer is known to be the same."""
        report: dict[str, Any] = self.call("wake")
        if self.ask_for_tokens() != self.answer:
            raise RuntimeError("the answer is another one after a wake")
        return report

    def call(self, method: str, *args: Any) -> Any:
        reply = self._core.call(Call(0, method, list(args)))
        if reply is None or reply.error is not None:
            raise RuntimeError(f"{method} failed: {reply}")
        return reply.result

    def ask_for_tokens(self) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        self._core.add(AddRequest("r", PROMPT, params, 0.0))
        tokens: list[int] = []
        while self._core.has_work:
            for output in self._core.step().outputs:
                tokens += output.new_token_ids
        return tokens


def main(folder: str, options: str, num_nights: str) -> None:
    engine = Measured(folder, json.loads(options))
    figures: dict[str, Any] = {"fresh": engine.fresh, **{tag: engine.held[tag] for tag in ("weights", "kv")}}
    for level in (1, 2):
        figures[f"awake_before_{level}"] = engine.awake()
        figures[f"asleep_{level}"] = engine.asleep(level)
        figures[f"wake_{level}"] = engine.wake()
    figures["nights"] = []
    for night in range(int(num_nights)):
        engine.awake()
        figures["nights"].append(engine.asleep(1 + night % 2))
        engine.call("wake")
    figures["last_answer_is_the_first"] = engine.ask_for_tokens() == engine.answer
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
