"""What each model needs and what this machine has: the supervisor's view of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from inferd.appliance.keepalive import parse_keep_alive
from inferd.appliance.library.facts import FactsStore, ModelFacts, after_load
from inferd.appliance.library.options import OptionsStore
from inferd.appliance.live import LiveSettings
from inferd.appliance.memory.devices import Devices
from inferd.appliance.memory.fit import MIB, PROCESS_BYTES, Estimate, estimate
from inferd.appliance.memory.ledger import Reading, ledger, room
from inferd.appliance.schemas import DeviceMemory, ModelMemory
from inferd.appliance.settings import Settings
from inferd.appliance.supervisor.catalog import Catalog
from inferd.appliance.supervisor.world import HOST, SLOTS, Holding
from inferd.engine.errors import EngineError
from inferd.engine.messages import MemoryRecord
from inferd.engine.model_config import read_model_config

log = logging.getLogger(__name__)
KV_SHARE = 0.25  # of a memory, for the keys and values of one model, if one context is not more than that
RESERVE_SHARE = 0.03  # of a memory, that is promised to nobody
UNREADABLE_FACTOR = 1.3  # of the file's size, for a model whose config.json says nothing
LOAD_BYTES_PER_S = 400 * MIB  # a guess, until the first load was timed
START_S = 4.0
WAKE_SHARE = 0.5  # of a load, until the first wake was timed


@dataclass(frozen=True)
class Resident:
    """One model's engine process."""

    model: str
    pid: int
    memory: tuple[MemoryRecord, ...]  # as of its last load, sleep or wake


@dataclass(frozen=True)
class MemoryNeeds:
    options: tuple[Holding, ...]
    asleep: tuple[Holding, Holding] | None
    load_s: float
    wake_s: float
    keep_alive_s: float | None
    pinned: bool
    estimate: Estimate
    hint: str  # what would make it fit, if it does not


class MemoryPlanner:
    """`residents` are asked for whenever they matter; everything else is read once for each model and load."""

    def __init__(
        self,
        live: LiveSettings,
        catalog: Catalog,
        facts: FactsStore,
        options: OptionsStore,
        devices: Devices,
        residents: Callable[[], Iterable[Resident]] = tuple,
    ) -> None:
        self.residents = residents
        self._live = live
        self._catalog = catalog
        self._facts = facts
        self._options = options
        self._devices = devices
        self._needs: dict[str, MemoryNeeds] = {}

        live.on_change(self._needs.clear)

    @property
    def _settings(self) -> Settings:
        return self._live.current

    @property
    def uses_gpus(self) -> bool:
        return bool(self._devices.gpus) and self._settings.engine.device != "cpu"

    def needs(self, model: str) -> MemoryNeeds:
        if (known := self._needs.get(model)) is None:
            known = self._needs[model] = self._reckon(model)
        return known

    def facts(self, model: str) -> ModelFacts:
        return self._facts.find(model)

    def forget(self, model: str) -> None:
        """Its options, files or facts have changed."""
        self._needs.pop(model, None)

    def capacity(self) -> Mapping[str, int]:
        settings, limit = self._settings, self._settings.max_loaded_models
        host = self.host_reading()
        capacity = {HOST: room(host, settings.memory_budget_bytes, int(host.total * RESERVE_SHARE))}
        for gpu in self._devices.gpus[:1] if self.uses_gpus else ():
            reading = self._devices.gpu(gpu.uuid, self.pids())
            capacity[gpu.uuid] = room(reading, None, int(reading.total * RESERVE_SHARE))
        return capacity if limit is None else {**capacity, SLOTS: limit}

    def host_reading(self) -> Reading:
        return self._devices.host(self.pids())

    def host_ledger(self) -> DeviceMemory:
        return ledger(self.host_reading(), [self._in_main_memory(resident) for resident in self.residents()])

    @property
    def devices(self) -> Devices:
        return self._devices

    def pids(self) -> list[int]:
        """Of our engine processes, without their children."""
        return [resident.pid for resident in self.residents()]

    def gpu_ledger(self, uuid: str) -> DeviceMemory:
        """All models lie on the one GPU that engines use."""
        rows = [model_memory(resident.memory) for resident in self.residents()]
        held = [msgspec.structs.replace(row, sleeping_host=0) for row in rows]
        first = self._devices.gpus[0].uuid
        return ledger(self._devices.gpu(uuid, self.pids()), held if uuid == first else [])

    def kv_cache_bytes(self, model: str) -> int | None:
        """What the engine is told to take; None where its own settings say so."""
        engine = self._settings.engine
        if engine.num_blocks is not None or engine.kv_cache_bytes is not None or engine.max_model_len == "auto":
            return None
        return self.needs(model).estimate.kv or None

    def loaded(self, model: str, memory: tuple[MemoryRecord, ...], load_s: float) -> None:
        """Compares the estimate with what was measured, for the next time."""
        self.forget(model)
        raw, facts = self._estimate(model, ModelFacts()), self._facts.find(model)
        total = model_memory(memory)
        measured = total.weights + total.graphs + total.workspace + (0 if self.uses_gpus else PROCESS_BYTES)
        self._facts.put(model, after_load(facts, load_s, raw.fixed, measured))

    def _reckon(self, model: str) -> MemoryNeeds:
        facts, options = self._facts.find(model), self._options.find(model)
        guess = self._estimate(model, facts)
        keep_alive = self._settings.keep_alive if options.keep_alive is None else options.keep_alive
        load_s = facts.load_s or START_S + self._catalog.find(model).size_bytes / LOAD_BYTES_PER_S
        return MemoryNeeds(
            options=self._placements(guess),
            asleep=None if self.uses_gpus else ({HOST: PROCESS_BYTES}, {HOST: PROCESS_BYTES}),
            load_s=load_s,
            wake_s=facts.wake_1_s or load_s * WAKE_SHARE,
            keep_alive_s=parse_keep_alive(keep_alive),
            pinned=options.pinned,
            estimate=guess,
            hint=self._hint(guess),
        )

    def _placements(self, guess: Estimate) -> tuple[Holding, ...]:
        place = {} if self._settings.max_loaded_models is None else {SLOTS: 1}
        if not self.uses_gpus:
            return ({HOST: guess.total, **place},)
        return ({self._devices.gpus[0].uuid: guess.total, HOST: PROCESS_BYTES, **place},)

    def _hint(self, guess: Estimate) -> str:
        largest = max((amount for pool, amount in self.capacity().items() if pool != SLOTS), default=0)
        if guess.total <= largest:
            return ""
        longest = guess.longest_context(largest)
        return f"; it fits with max_model_len = {longest}" if longest else "; choose a smaller model or quantisation"

    def _estimate(self, model: str, facts: ModelFacts) -> Estimate:
        """Corrected by `facts`. A model that cannot be read is taken for its size; its load will say what is wrong."""
        record, engine = self._catalog.find(model), self._settings.engine
        device = "cuda" if self.uses_gpus else "cpu"
        limit = engine.max_model_len if isinstance(engine.max_model_len, int) else None
        total = max((gpu.total_bytes for gpu in self._devices.gpus), default=0) if self.uses_gpus else self.host_total()
        try:
            guess = estimate(
                read_model_config(self._catalog.folder(record)),
                device=device,
                dtype=engine.dtype,
                context_limit=limit,
                kv_bytes=engine.kv_cache_bytes,
                kv_share_bytes=int(total * KV_SHARE),
            )
        except EngineError as error:
            log.warning("%s: its memory cannot be estimated: %s", model, error)
            guess = Estimate(
                int(record.size_bytes * UNREADABLE_FACTOR), 0, PROCESS_BYTES, 0, 0, 0, record.context_limit
            )
        return guess.scaled(facts.memory_ratio or 1.0)

    def host_total(self) -> int:
        return min(self.host_reading().total, self._settings.memory_budget_bytes or 1 << 62)

    def _in_main_memory(self, resident: Resident) -> ModelMemory:
        """A checkpoint that is only mapped is the system's to keep or to drop."""
        held = model_memory(resident.memory)
        if self.uses_gpus:
            return ModelMemory(workspace=PROCESS_BYTES, sleeping_host=held.sleeping_host)
        return msgspec.structs.replace(held, workspace=held.workspace + PROCESS_BYTES, sleeping_host=0)


def model_memory(records: Iterable[MemoryRecord]) -> ModelMemory:
    """All ranks together."""
    ranks = list(records)
    return ModelMemory(
        weights=sum(rank.weights for rank in ranks),
        kv=sum(rank.kv for rank in ranks),
        graphs=sum(rank.graphs for rank in ranks),
        workspace=sum(rank.workspace for rank in ranks),
        sleeping_host=sum(rank.sleeping_host for rank in ranks),
    )
