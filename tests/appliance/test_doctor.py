"""Every check of the doctor is broken once, and its line and its remedy are read."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferd.appliance.doctor.examine import Facts, examine
from inferd.appliance.doctor.finding import Finding
from inferd.appliance.doctor.gpu import GpuFacts
from inferd.appliance.doctor.library import LibraryFacts
from inferd.appliance.doctor.machine import GIB, MachineFacts
from inferd.appliance.doctor.network import NetworkFacts
from inferd.appliance.doctor.places import Place, PlaceFacts, Step
from inferd.appliance.doctor.service import ServiceFacts
from inferd.appliance.doctor.software import EngineAbout, SoftwareFacts
from inferd.appliance.downloads.stagings import UnfinishedPull

NOW = 1_800_000_000.0
HOME = Path("/var/lib/inferd")


def folder(path: str, mode: int = 0o755, **rights: bool) -> Step:
    return Step(Path(path), stat.S_IFDIR | mode, **rights)


WAY = (folder("/"), folder("/var"), folder("/var/lib"), folder("/var/lib/inferd", 0o700))
HEALTHY = Facts(
    gpu=GpuFacts(1, "580.95.05", names=("H200",)),
    software=SoftwareFacts(
        torch="2.13.0",
        compiler="/usr/bin/cc",
        engine=EngineAbout(torch="2.13.0", cuda="13.0", num_gpus=1, kernels=("kernels: own",)),
        num_gpus=1,
    ),
    machine=MachineFacts(
        home=HOME,
        disk_free_bytes=100 * GIB,
        memory_total_bytes=64 * GIB,
        memory_available_bytes=60 * GIB,
        shared_memory_bytes=32 * GIB,
        num_ranks=2,
        now=NOW,
        not_before=NOW - 1,
    ),
    places=PlaceFacts(
        (
            Place("home", HOME, WAY),
            Place("run_dir", Path("/run/inferd"), (folder("/"), folder("/run"), folder("/run/inferd", 0o700))),
            Place(
                "cache",
                Path("/var/cache/x"),
                (folder("/"), folder("/var"), folder("/var/cache", 0o1777)),
                must_run=True,
            ),
        )
    ),
    network=NetworkFacts(),
    library=LibraryFacts(HOME / "library.db", exists=True, num_models=1),
    service=ServiceFacts(units=(Path("/usr/local/lib/systemd/system/inferd.service"),)),
)


def broken(group: str, **changes: Any) -> Facts:
    return replace(HEALTHY, **{group: replace(getattr(HEALTHY, group), **changes)})


def broken_place(name: str, **changes: Any) -> Facts:
    places = tuple(replace(place, **changes) if place.name == name else place for place in HEALTHY.places.places)
    return broken("places", places=places)


def engine(**changes: Any) -> EngineAbout:
    return EngineAbout(**({"torch": "2.13.0", "cuda": "13.0", "num_gpus": 1, "kernels": ("kernels: own",)} | changes))


PULL = UnfinishedPull("smol", "hf:a/b", None, 5 * 2**20)
BREAKS: list[tuple[str, Facts, str, str, str]] = [  # check, facts, status, words of the text, words of the remedy
    (
        "gpu driver",
        broken("gpu", driver=None, driver_error="Driver/library version mismatch"),
        "failure",
        "mismatch",
        "Reboot",
    ),
    ("gpu driver", broken("gpu", driver=None), "warning", "1 NVIDIA card(s) and no driver", "driver 580 or newer"),
    ("gpu driver", broken("gpu", driver="535.1"), "failure", "535.1 is too old", "driver 580 or newer"),
    (
        "gpu device files",
        broken("gpu", missing_nodes=("/dev/nvidia-uvm",)),
        "failure",
        "/dev/nvidia-uvm",
        "nvidia-modprobe",
    ),
    (
        "gpu device files",
        broken("gpu", closed_nodes=("/dev/nvidia0",)),
        "failure",
        "/dev/nvidia0",
        "usermod -aG video,render",
    ),
    ("gpus in torch", broken("software", engine=engine(num_gpus=0)), "failure", "0 of 1", "CUDA_VISIBLE_DEVICES"),
    (
        "gpus in torch",
        broken("software", engine=engine(num_gpus=0, cuda=None)),
        "failure",
        "0 of 1",
        "brings one with CUDA",
    ),
    ("python", broken("software", python=(3, 14)), "failure", "3.14", "Python 3.11"),
    ("torch", broken("software", torch=None), "failure", "not installed", "constraints.txt"),
    ("torch", broken("software", torch="2.9.1+cpu"), "failure", "2.9.1+cpu", "constraints.txt"),
    ("compiler", broken("software", compiler=None), "warning", "gcc", "apt install gcc"),
    (
        "kernels",
        broken("software", engine=None, engine_error="ImportError: x"),
        "failure",
        "ImportError: x",
        "inferd.engine.about",
    ),
    (
        "kernels",
        broken("software", engine=engine(kernels=("kernels: plain torch, because y",))),
        "warning",
        "because y",
        "Mend",
    ),
    ("kernels", broken("software", engine=engine(kernels_error="no AVX2")), "failure", "no AVX2", "engine.kernels"),
    ("disk", broken("machine", disk_free_bytes=GIB // 2), "failure", "512.0 MiB free", "Make room"),
    ("disk", broken("machine", disk_free_bytes=5 * GIB), "warning", "5.0 GiB free", "inferd rm"),
    ("memory", broken("machine", memory_available_bytes=GIB // 2), "failure", "512.0 MiB of 64.0 GiB", "inferd unload"),
    ("memory", broken("machine", memory_budget_bytes=65 * GIB), "failure", "65.0 GiB", "Set memory_budget_bytes"),
    (
        "memory",
        broken("machine", memory_budget_bytes=9 * GIB, memory_limit_bytes=8 * GIB),
        "failure",
        "there are 8.0 GiB",
        "raise the limit",
    ),
    ("shared memory", broken("machine", shared_memory_bytes=64 * 2**20), "failure", "64.0 MiB", "--shm-size"),
    ("shared memory", broken("machine", shared_memory_bytes=None), "failure", "0 B", "mount -o remount"),
    ("clock", broken("machine", now=86400.0 * 3), "failure", "1970-01-04", "timedatectl set-ntp true"),
    (
        "permissions of home",
        broken_place("home", steps=(*WAY[:2], folder("/var/lib", may_enter=False))),
        "failure",
        "may not enter /var/lib, on the way to /var/lib/inferd",
        "chmod o+x /var/lib",
    ),
    (
        "permissions of home",
        broken_place("home", steps=(*WAY[:2], folder("/var/lib", 0o777), WAY[3])),
        "failure",
        "anybody may write to /var/lib",
        "chmod o-w /var/lib",
    ),
    (
        "permissions of home",
        broken_place("home", steps=(*WAY[:3], folder("/var/lib/inferd", 0o700, may_write=False))),
        "failure",
        "may not write to /var/lib/inferd",
        "chown",
    ),
    (
        "permissions of home",
        broken_place("home", steps=(*WAY[:3], folder("/var/lib/inferd", 0o750))),
        "failure",
        "mode 750",
        "chmod 700 /var/lib/inferd",
    ),
    (
        "permissions of run_dir",
        broken_place("run_dir", steps=(folder("/"), Step(Path("/run"), stat.S_IFREG, is_folder=False))),
        "failure",
        "/run is no folder",
        "another run_dir",
    ),
    ("permissions of cache", broken_place("cache", no_exec=True), "failure", "noexec", "XDG_CACHE_HOME"),
    (
        "socket paths",
        broken("places", run_dir=Path("/run") / ("x" * 90)),
        "failure",
        "107 are allowed",
        "INFERD_RUN_DIR",
    ),
    ("secrets", broken("places", open_secrets=(HOME / "admin.key",)), "failure", "admin.key", "chmod 600"),
    ("port", broken("network", holder="nginx (pid 7)"), "failure", "taken by nginx (pid 7)", "INFERD_PORT"),
    ("port", broken("network", bind_error="Permission denied"), "failure", "Permission denied", "above 1023"),
    ("database", broken("library", error="disk I/O error"), "failure", "disk I/O error", "pull again"),
    (
        "database",
        broken("library", integrity=("row 3 missing",), backups=(HOME / "library.db.before-m011",)),
        "failure",
        "row 3 missing",
        "cp /var/lib/inferd/library.db.before-m011",
    ),
    (
        "schema",
        broken("library", schema_error="changed by a newer inferd"),
        "failure",
        "newer inferd",
        "Install the newer",
    ),
    ("schema", broken("library", pending=("m011", "m012")), "warning", "2 steps behind", "Start the daemon"),
    ("models", broken("library", lost=("tiny",)), "failure", "tiny", "inferd rm tiny"),
    ("downloads", broken("library", unfinished=(PULL,)), "warning", "smol (5.0 MiB)", "`inferd pull hf:a/b` goes on"),
    (
        "leftovers",
        broken("service", leftovers=(Path("/run/inferd/d-1"),)),
        "warning",
        "/run/inferd/d-1",
        "inferd incidents",
    ),
    (
        "unit",
        broken("service", units=(Path("/etc/systemd/system/inferd.service"), Path("/usr/lib/x"))),
        "warning",
        "/etc/systemd/system/inferd.service hides /usr/lib/x",
        "systemctl edit",
    ),
    ("unit", broken("service", drop_ins=(Path("/etc/o.conf"),)), "warning", "/etc/o.conf", "systemctl revert"),
]


def findings_of(facts: Facts) -> dict[str, Finding]:
    findings = examine(facts)
    assert len({finding.check for finding in findings}) == len(findings)
    return {finding.check: finding for finding in findings}


def test_a_healthy_machine() -> None:
    assert {finding.check: finding.text for finding in examine(HEALTHY) if finding.status != "ok"} == {}
    assert not any(finding.remedy for finding in examine(HEALTHY))


def test_every_check_is_broken_below() -> None:
    assert {check for check, *_ in BREAKS} == set(findings_of(HEALTHY))


@pytest.mark.parametrize(("check", "facts", "status", "said", "remedy"), BREAKS)
def test_what_is_wrong_is_said_with_its_remedy(check: str, facts: Facts, status: str, said: str, remedy: str) -> None:
    findings = findings_of(facts)
    finding = findings[check]
    assert finding.status == status
    assert said in finding.text
    assert remedy in finding.remedy
    assert finding.remedy.endswith(".")
    assert [other.check for other in findings.values() if other.status != "ok"] == [check], "and of nothing else"


def test_a_machine_without_cards_is_healthy() -> None:
    facts = replace(
        HEALTHY,
        gpu=GpuFacts(),
        software=replace(HEALTHY.software, num_gpus=0, engine=engine(num_gpus=0, cuda=None)),
        machine=replace(HEALTHY.machine, num_ranks=1, shared_memory_bytes=None),
        library=LibraryFacts(),
        service=ServiceFacts(),
    )
    findings = findings_of(facts)
    assert {finding.status for finding in findings.values()} == {"ok"}
    assert "no NVIDIA card" in findings["gpu driver"].text


def test_twins_that_were_asked_for_are_no_complaint() -> None:
    twins = engine(kernels=("kernels: plain torch, because kernels='torch' asks for it",))
    assert findings_of(broken("software", engine=twins, kernels_choice="torch"))["kernels"].status == "ok"


def test_cards_that_are_not_to_be_used_need_not_be_seen() -> None:
    facts = broken("software", engine=engine(num_gpus=0), device_choice="cpu")
    assert "gpus in torch" not in findings_of(facts)
