"""GPUs through a played driver library: what is ours, what is not, and what a card does not say."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from inferd.appliance.memory.devices import Vitals
from inferd.appliance.memory.ledger import ledger
from inferd.appliance.memory.nvml import NvmlDevices
from inferd.appliance.schemas import ModelMemory

GIB = 1 << 30


class NotSupported(Exception):
    pass


class PlayedNvml:
    NVMLError = NotSupported
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.memory = SimpleNamespace(total=80 * GIB, free=50 * GIB)
        self.processes = [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=20 * GIB),
            SimpleNamespace(pid=1, usedGpuMemory=9 * GIB),
        ]
        self.num_reads = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return b"GPU-1"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "Played"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self.num_reads += 1
        return self.memory

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        return self.processes

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=93)

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 71

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 612_000

    def nvmlDeviceGetFanSpeed(self, handle: int) -> int:
        raise NotSupported


@pytest.fixture
def nvml() -> PlayedNvml:
    return PlayedNvml()


def test_ours_and_others_and_what_is_free_add_up(nvml: PlayedNvml) -> None:
    devices = NvmlDevices(nvml)
    (gpu,) = devices.gpus
    assert (gpu.uuid, gpu.index, gpu.name, gpu.total_bytes) == ("GPU-1", 0, "Played", 80 * GIB)
    reading = devices.gpu("GPU-1", [os.getpid()])
    assert (reading.ours, reading.other) == (20 * GIB, 10 * GIB)  # the driver's own share is nobody's process
    memory = ledger(reading, [ModelMemory(weights=16 * GIB, kv=4 * GIB)])
    assert (memory.other, memory.free, memory.total) == (10 * GIB, 50 * GIB, 80 * GIB)
    (other,) = devices.others("GPU-1", [os.getpid()])
    assert (other.pid, other.bytes) == (1, 9 * GIB)


def test_what_a_card_does_not_say_is_unknown(nvml: PlayedNvml) -> None:
    assert NvmlDevices(nvml).vitals("GPU-1") == Vitals(util=0.93, power_w=612.0, temperature_c=71.0, fan=None)


def test_the_driver_is_not_asked_more_than_twice_a_second(nvml: PlayedNvml) -> None:
    devices = NvmlDevices(nvml)
    before = nvml.num_reads
    for _ in range(50):
        devices.gpu("GPU-1", [])
    assert nvml.num_reads == before + 1
