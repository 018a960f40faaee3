"""What was measured of a model: how long it takes, and how far the estimate of its memory was off."""

from __future__ import annotations

import msgspec

from inferd.appliance.library.db import LibraryDatabase

RATIO_BOUNDS = (0.25, 8.0)  # outside of these it is not the same model, or not a measurement


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """None: not measured yet. `memory_ratio` is what was measured over what was estimated, without keys and values."""

    load_s: float | None = None
    wake_1_s: float | None = None
    wake_2_s: float | None = None
    memory_ratio: float | None = None
    error_ratio: float | None = None  # of the last estimate, which was corrected already
    num_loads: int = 0


class FactsStore:
    """Safe to use from any thread."""

    def __init__(self, database: LibraryDatabase) -> None:
        self._database = database

    def find(self, model: str) -> ModelFacts:
        with self._database.reading() as db:
            row = db.conn.execute("SELECT facts FROM model_facts WHERE model_id = ?", [model]).fetchone()
        return msgspec.json.decode(row[0], type=ModelFacts) if row is not None else ModelFacts()

    def put(self, model: str, facts: ModelFacts) -> None:
        with self._database.writing() as db:
            db.conn.execute(
                "INSERT OR REPLACE INTO model_facts (model_id, facts) VALUES (?, ?)",
                [model, msgspec.json.encode(facts).decode()],
            )


def after_load(facts: ModelFacts, load_s: float, estimated: int, measured: int) -> ModelFacts:
    """`estimated` before correction, `measured` now; both without keys and values."""
    low, high = RATIO_BOUNDS
    ratio = min(max(measured / max(estimated, 1), low), high)
    corrected = estimated * (facts.memory_ratio or 1.0)
    return msgspec.structs.replace(
        facts,
        load_s=load_s,
        memory_ratio=ratio,
        error_ratio=measured / max(corrected, 1.0) - 1.0,
        num_loads=facts.num_loads + 1,
    )
