"""All groups of checks together: read once what there is, then judge it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inferd.appliance.doctor.finding import Finding
from inferd.appliance.doctor.gpu import GpuFacts, check_gpu, read_gpu
from inferd.appliance.doctor.library import LibraryFacts, check_library, read_library
from inferd.appliance.doctor.machine import MachineFacts, check_machine, read_machine
from inferd.appliance.doctor.network import NetworkFacts, check_network, read_network
from inferd.appliance.doctor.places import PlaceFacts, check_places, read_places
from inferd.appliance.doctor.service import ServiceFacts, check_service, read_service
from inferd.appliance.doctor.software import SoftwareFacts, check_software, read_software
from inferd.appliance.settings import Settings


@dataclass(frozen=True)
class Facts:
    """What was read, by group. Judging it asks the machine for nothing more."""

    gpu: GpuFacts = field(default_factory=GpuFacts)
    software: SoftwareFacts = field(default_factory=SoftwareFacts)
    machine: MachineFacts = field(default_factory=MachineFacts)
    places: PlaceFacts = field(default_factory=PlaceFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    library: LibraryFacts = field(default_factory=LibraryFacts)
    service: ServiceFacts = field(default_factory=ServiceFacts)


def examine(facts: Facts) -> list[Finding]:
    return [
        *check_gpu(facts.gpu),
        *check_software(facts.software),
        *check_machine(facts.machine),
        *check_places(facts.places),
        *check_network(facts.network),
        *check_library(facts.library),
        *check_service(facts.service),
    ]


def read_facts(settings: Settings, environment: Mapping[str, str]) -> Facts:
    """Takes seconds: torch is imported in a process of its own."""
    gpu = read_gpu()
    user = Path(environment.get("HOME") or "/")
    cache = Path(environment.get("XDG_CACHE_HOME") or user / ".cache") / "inferd"
    engine, num_gpus = settings.engine, len(gpu.names)
    return Facts(
        gpu=gpu,
        software=read_software(num_gpus=num_gpus, kernels=engine.kernels, device=engine.device),
        machine=read_machine(
            settings.home,
            memory_budget_bytes=settings.memory_budget_bytes,
            num_ranks=engine.tensor_parallel_size,
        ),
        places=read_places(settings.home, settings.run_dir, cache),
        network=read_network(settings.host, settings.port),
        library=read_library(settings.home),
        service=read_service(settings.run_dir, Path(environment.get("XDG_CONFIG_HOME") or user / ".config")),
    )
