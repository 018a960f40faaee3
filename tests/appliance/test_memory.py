"""Memory before and after a load: estimates, rows that add up, and what a measurement teaches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.appliance.keepalive import parse_keep_alive
from inferd.appliance.library.facts import FactsStore
from inferd.appliance.library.library import Library
from inferd.appliance.library.options import ModelOptions, OptionsStore
from inferd.appliance.library.records import ModelRecord
from inferd.appliance.live import LiveSettings
from inferd.appliance.memory.fit import PROCESS_BYTES, Estimate, estimate, num_parameters
from inferd.appliance.memory.ledger import Reading, ledger, room
from inferd.appliance.memory.planner import MemoryPlanner, Resident
from inferd.appliance.memory.probe import HostProbe
from inferd.appliance.schemas import ModelMemory
from inferd.appliance.settings import Settings
from inferd.appliance.supervisor.catalog import Catalog
from inferd.appliance.supervisor.world import HOST, SLOTS
from inferd.engine.config import ModelConfig
from inferd.engine.messages import MemoryRecord
from inferd.engine.model_config import read_model_config

GIB = 1 << 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return read_model_config(folder)


def test_parameters_are_those_of_the_matrices(tmp_path: Path) -> None:
    attention = 512 * (8 + 2 + 2 + 8) * 64
    assert num_parameters(config_of(tmp_path)) == 4 * (attention + 3 * 512 * 1024) + 1000 * 512


def test_keys_and_values_hold_one_context_at_least(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    token_bytes = 4 * 2 * 2 * 64 * 2
    small = estimate(config, device="cpu", kv_share_bytes=0)
    large = estimate(config, device="cpu", kv_share_bytes=100 * GIB)
    assert small.kv == 4096 * token_bytes
    assert large.kv == 65536 * token_bytes
    assert estimate(config, device="cpu", kv_bytes=7, kv_share_bytes=0).kv == 7


def test_the_longest_context_that_fits_is_exact(tmp_path: Path) -> None:
    guess = estimate(config_of(tmp_path), device="cpu", kv_share_bytes=0)
    assert guess.longest_context(guess.fixed + guess.kv_bytes(1000)) == 1000
    assert guess.longest_context(guess.fixed + guess.kv_bytes(1000) - 1) == 999
    assert guess.longest_context(guess.fixed - 1) == 0
    assert guess.longest_context(100 * GIB) == 4096


@given(
    st.integers(0, 64),
    st.integers(0, 64),
    st.integers(0, 64),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))),
)
def test_rows_add_up_to_the_total(total: int, available: int, ours: int, held: list[tuple[int, int]]) -> None:
    reading = Reading(max(total, available), available, ours)
    rows = [ModelMemory(weights=weights, kv=kv) for weights, kv in held]
    memory = ledger(reading, rows)
    parts = (memory.weights, memory.kv, memory.graphs, memory.workspace, memory.sleeping, memory.other, memory.free)
    assert sum(parts) == memory.total
    assert min(parts) >= 0
    if sum(weights + kv for weights, kv in held) <= reading.total:
        assert memory.total == reading.total


def test_models_may_have_what_others_leave() -> None:
    reading = Reading(total=100, available=50, ours=20)
    assert room(reading, limit=None, reserve=3) == 67
    assert room(reading, limit=40, reserve=3) == 40


def test_a_probe_tells_ours_from_others() -> None:
    source = "import time; held = bytearray(200 << 20); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            reading = HostProbe().read([child.pid])
            assert 200 << 20 < reading.ours < 300 << 20
            assert HostProbe().read([os.getpid()]).ours > reading.ours  # children are counted with their parent
        finally:
            child.kill()
    assert HostProbe().read([child.pid]).ours == 0


class FixedDevices:
    gpus = ()

    def __init__(self, total: int) -> None:
        self.reading = Reading(total, total, 0)

    def host(self, pids: object) -> Reading:
        return self.reading

    def gpu(self, uuid: str, pids: object) -> Reading:
        raise KeyError(uuid)

    vitals = others = gpu


@pytest.fixture
def library(inferd_home: Path) -> Any:
    with Library.open(inferd_home) as opened:
        yield opened


def add_model(library: Library, name: str = "m", **changes: Any) -> None:
    config_of(library.models_folder / name, **changes)
    library.add(
        ModelRecord(
            id=name,
            source="file:/x",
            revision=None,
            format="gguf",
            architecture="LlamaForCausalLM",
            path=f"models/{name}",
            size_bytes=GIB,
            quantisation=None,
            context_limit=4096,
            created_at=1,
        )
    )


def make_planner(library: Library, total: int = 8 * GIB, **settings: Any) -> MemoryPlanner:
    facts, options = FactsStore(library.database), OptionsStore(library.database)
    live = LiveSettings(Settings(home=library.home, **settings))
    return MemoryPlanner(live, Catalog(library), facts, options, FixedDevices(total))


def records_of(guess: Estimate, factor: float) -> tuple[MemoryRecord, ...]:
    """What an engine reports whose fixed part is `factor` times the estimate."""
    fixed = int(guess.fixed * factor) - PROCESS_BYTES
    return (MemoryRecord(weights=fixed // 2, kv=guess.kv, workspace=fixed - fixed // 2),)


def test_a_wrong_estimate_is_right_the_third_time(library: Library) -> None:
    add_model(library)
    planner = make_planner(library)
    raw = planner.needs("m").estimate
    for _ in range(2):
        planner.loaded("m", records_of(raw, 1.3), load_s=2.0)
    assert planner.needs("m").estimate.fixed == pytest.approx(raw.fixed * 1.3, rel=0.05)
    planner.loaded("m", records_of(raw, 1.3), load_s=2.0)
    facts = FactsStore(library.database).find("m")
    assert facts.error_ratio == pytest.approx(0, abs=0.05)
    assert facts.num_loads == 3
    assert planner.needs("m").load_s == 2.0


def test_facts_survive_a_restart_and_leave_with_the_model(inferd_home: Path) -> None:
    with Library.open(inferd_home) as library:
        add_model(library)
        make_planner(library).loaded("m", (MemoryRecord(weights=GIB),), load_s=3.0)
    with Library.open(inferd_home) as library:
        assert FactsStore(library.database).find("m").load_s == 3.0
        library.remove("m")
        assert FactsStore(library.database).find("m").load_s is None


def test_needs_name_memory_and_a_place(library: Library) -> None:
    add_model(library)
    (option,) = make_planner(library, max_loaded_models=2).needs("m").options
    assert option[SLOTS] == 1
    assert option[HOST] > PROCESS_BYTES
    (option,) = make_planner(library).needs("m").options
    assert SLOTS not in option


def test_what_cannot_fit_says_which_context_would(library: Library) -> None:
    add_model(library, max_position_embeddings=1 << 20)
    planner = make_planner(library, total=2 * GIB)
    hint = planner.needs("m").hint
    longest = int(hint.rsplit("= ", 1)[1])
    guess = planner.needs("m").estimate
    assert guess.fixed + guess.kv_bytes(longest) <= planner.capacity()[HOST] < guess.fixed + guess.kv_bytes(longest + 1)


def test_the_owners_options_count(library: Library) -> None:
    add_model(library)
    options = OptionsStore(library.database)
    assert make_planner(library, keep_alive="1h").needs("m").keep_alive_s == 3600
    options.put("m", ModelOptions(pinned=True, keep_alive="-1"))
    needs = make_planner(library).needs("m")
    assert (needs.pinned, needs.keep_alive_s) == (True, None)


def test_the_ledger_counts_what_is_reserved(library: Library) -> None:
    add_model(library)
    planner = make_planner(library, total=8 * GIB)
    planner.residents = lambda: [Resident("m", 1, (MemoryRecord(weights=GIB, kv=2 * GIB),))]
    memory = planner.host_ledger()
    assert (memory.weights, memory.kv, memory.workspace) == (GIB, 2 * GIB, PROCESS_BYTES)
    assert memory.free == 5 * GIB - PROCESS_BYTES


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("300", 300),
        (300, 300),
        (1.5, 1.5),
        (0, 0),
        ("0", 0),
        (-1, None),
        ("-1", None),
        ("-1m", None),
        ("forever", None),
    ],
)
def test_keep_alive_is_read(text: str | float, seconds: float | None) -> None:
    assert parse_keep_alive(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "10x", "10 minutes", "nan", "inf", float("nan"), True, "1m;"])
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="keep_alive"):
        parse_keep_alive(text)


def test_a_reading_is_kept_for_a_moment() -> None:
    probe = HostProbe()
    began = time.monotonic()
    readings = {id(probe.read([])) for _ in range(200)}
    assert len(readings) <= 1 + (time.monotonic() - began) / 0.5
