"""Publishes who has the memory of this machine, and how busy it is."""

from __future__ import annotations

import platform

import psutil

from inferd.appliance.events.hub import EventHub
from inferd.appliance.memory.devices import Gpu
from inferd.appliance.memory.planner import MemoryPlanner
from inferd.appliance.memory.probe import family, kept_bytes
from inferd.appliance.schemas import DeviceStatus, OtherProcess

NUM_OTHERS = 5
OTHERS_EVERY = 5  # refreshes: looking at every process of the machine is not free


class DeviceBoard:
    def __init__(self, hub: EventHub, planner: MemoryPlanner) -> None:
        self._hub = hub
        self._planner = planner
        self._name = platform.processor() or platform.machine()
        self._others: tuple[OtherProcess, ...] = ()
        self._num_refreshes = 0

    def refresh(self) -> None:
        if self._num_refreshes % OTHERS_EVERY == 0:
            self._others = self._largest_others()
        self._num_refreshes += 1
        for gpu in self._planner.devices.gpus:
            self._hub.put("devices", self._gpu(gpu))
        self._hub.put(
            "devices",
            DeviceStatus(
                id="host",
                name=self._name,
                util=round(psutil.cpu_percent() / 100, 3),
                memory=self._planner.host_ledger(),
                processes_other=self._others,
            ),
        )

    def _gpu(self, gpu: Gpu) -> DeviceStatus:
        devices = self._planner.devices
        vitals = devices.vitals(gpu.uuid)
        return DeviceStatus(
            id=gpu.uuid,
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            util=vitals.util,
            power_w=vitals.power_w,
            temperature_c=vitals.temperature_c,
            fan=vitals.fan,
            memory=self._planner.gpu_ledger(gpu.uuid),
            processes_other=devices.others(gpu.uuid, self._planner.pids())[:NUM_OTHERS],
        )

    def _largest_others(self) -> tuple[OtherProcess, ...]:
        ours = {pid for resident in self._planner.residents() for pid in family(resident.pid)}
        sized = []
        for process in psutil.process_iter(["pid", "name"]):
            if process.pid not in ours and (size := kept_bytes(process.pid)):
                sized.append(OtherProcess(pid=process.pid, name=process.info["name"] or "", bytes=size))
        return tuple(sorted(sized, key=lambda other: -other.bytes)[:NUM_OTHERS])
