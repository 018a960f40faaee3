"""GPUs as the driver's library (NVML) sees them. No CUDA context is made: the daemon takes no memory of a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import pynvml

from inferd.appliance.memory.devices import Gpu, Vitals
from inferd.appliance.memory.ledger import Reading
from inferd.appliance.memory.probe import FRESH_S, HostProbe, family
from inferd.appliance.schemas import OtherProcess

log = logging.getLogger(__name__)


class NvmlDevices:
    """Implements `Devices`; a reading is good for half a second."""

    def __init__(self, nvml: Any = pynvml) -> None:
        """Raises `pynvml.NVMLError` where there is no driver."""
        self._nvml = nvml
        self._host = HostProbe()
        self._readings: dict[str, tuple[float, Reading]] = {}
        nvml.nvmlInit()
        self._handles = {
            _text(nvml.nvmlDeviceGetUUID(handle)): (index, handle)
            for index in range(nvml.nvmlDeviceGetCount())
            for handle in (nvml.nvmlDeviceGetHandleByIndex(index),)
        }
        self.gpus = tuple(
            Gpu(uuid, index, _text(nvml.nvmlDeviceGetName(handle)), nvml.nvmlDeviceGetMemoryInfo(handle).total)
            for uuid, (index, handle) in self._handles.items()
        )

    def host(self, pids: Iterable[int]) -> Reading:
        return self._host.read(pids)

    def gpu(self, uuid: str, pids: Iterable[int]) -> Reading:
        read_at, reading = self._readings.get(uuid, (-FRESH_S, None))
        now = time.monotonic()
        if reading is None or now - read_at > FRESH_S:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handles[uuid][1])
            mine = {pid for root in pids for pid in family(root)}
            ours = sum(size for pid, size in self._processes(uuid) if pid in mine)
            reading = Reading(memory.total, memory.free, ours)
            self._readings[uuid] = (now, reading)
        return reading

    def vitals(self, uuid: str) -> Vitals:
        nvml, handle = self._nvml, self._handles[uuid][1]
        power = self._asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        fan = self._asked(lambda: nvml.nvmlDeviceGetFanSpeed(handle))
        util = self._asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        heat = self._asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return Vitals(
            util=None if util is None else util / 100,
            power_w=None if power is None else power / 1000,
            temperature_c=None if heat is None else float(heat),
            fan=None if fan is None else fan / 100,
        )

    def others(self, uuid: str, pids: Iterable[int]) -> tuple[OtherProcess, ...]:
        """Programs that are not ours, the largest first."""
        mine = {pid for root in pids for pid in family(root)}
        found = [
            OtherProcess(pid=pid, name=_name(pid), bytes=size) for pid, size in self._processes(uuid) if pid not in mine
        ]
        return tuple(sorted(found, key=lambda process: -process.bytes))

    def _processes(self, uuid: str) -> list[tuple[int, int]]:
        handle = self._handles[uuid][1]
        running = self._asked(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        return [(process.pid, process.usedGpuMemory or 0) for process in running]

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """None for what this card or driver does not know."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return None


def find_devices() -> NvmlDevices | None:
    """None on a machine without a driver of NVIDIA."""
    try:
        devices = NvmlDevices()
    except pynvml.NVMLError as error:
        log.debug("no GPUs: %s", error)
        return None
    return devices if devices.gpus else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""
