"""The cards and their driver. A machine without them is a healthy machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inferd.appliance.doctor.finding import Finding, failure, fine, warning

OLDEST_DRIVER = 580  # the first whose CUDA is 13, which torch is built with
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor, and the class of graphics and compute cards
NODES = ("nvidiactl", "nvidia-uvm", "nvidia0")


@dataclass(frozen=True)
class GpuFacts:
    num_cards: int = 0  # of NVIDIA, on the PCI bus
    driver: str | None = None  # version; None: no library of the driver, or no driver
    driver_error: str = ""  # of a library that is there but does not work
    names: tuple[str, ...] = ()
    missing_nodes: tuple[str, ...] = ()
    closed_nodes: tuple[str, ...] = ()  # that this user may not open


def check_gpu(facts: GpuFacts) -> Iterator[Finding]:
    yield _driver(facts)
    if facts.driver is not None:
        yield _nodes(facts)


def _driver(facts: GpuFacts) -> Finding:
    name = "gpu driver"
    if facts.driver_error:
        remedy = "Reboot, so that the driver's kernel module and its library are of one version; else install it anew."
        return failure(name, f"NVIDIA's driver does not answer: {facts.driver_error}", remedy)
    if facts.driver is None:
        if facts.num_cards == 0:
            return fine(name, "no NVIDIA card: models run on the processor")
        text = f"{facts.num_cards} NVIDIA card(s) and no driver: models run on the processor"
        return warning(name, text, f"Install NVIDIA's driver {OLDEST_DRIVER} or newer and reboot.")
    major = re.match(r"\d+", facts.driver)
    if major is None or int(major[0]) < OLDEST_DRIVER:
        text = f"driver {facts.driver} is too old for the CUDA that torch is built with"
        return failure(name, text, f"Install NVIDIA's driver {OLDEST_DRIVER} or newer and reboot.")
    return fine(name, f"driver {facts.driver}, {len(facts.names)} card(s): {', '.join(sorted(set(facts.names)))}")


def _nodes(facts: GpuFacts) -> Finding:
    name = "gpu device files"
    if facts.missing_nodes:
        remedy = "Run `nvidia-modprobe -c 0 -u` as root, or let nvidia-persistenced start with the machine."
        return failure(name, f"missing: {', '.join(facts.missing_nodes)}", remedy)
    if facts.closed_nodes:
        remedy = "Add this user to the groups that own them: `usermod -aG video,render USER`, then log in again."
        return failure(name, f"may not be opened by this user: {', '.join(facts.closed_nodes)}", remedy)
    return fine(name, "there, and open to this user")


def read_gpu(root: Path = Path("/")) -> GpuFacts:
    num_cards = sum(1 for device in (root / "sys/bus/pci/devices").glob("*") if _is_card(device))
    driver, error, names = _ask_driver()
    nodes = [root / "dev" / node for node in NODES]
    present = [node for node in nodes if node.exists()]
    return GpuFacts(
        num_cards=num_cards,
        driver=driver,
        driver_error=error,
        names=names,
        missing_nodes=tuple(str(node) for node in nodes if node not in present),
        closed_nodes=tuple(str(node) for node in present if not os.access(node, os.R_OK | os.W_OK)),
    )


def _is_card(device: Path) -> bool:
    try:
        vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
    except OSError:
        return False
    return vendor.strip() == NVIDIA and kind.startswith(DISPLAY)


def _ask_driver() -> tuple[str | None, str, tuple[str, ...]]:
    """Version, error, names of the cards."""
    import pynvml  # here, because it looks for the driver's library

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None, "", ()
    except pynvml.NVMLError as error:
        return None, str(error), ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
        return str(pynvml.nvmlSystemGetDriverVersion()), "", names
    except pynvml.NVMLError as error:
        return None, str(error), ()
    finally:
        pynvml.nvmlShutdown()
