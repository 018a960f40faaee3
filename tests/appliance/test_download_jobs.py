"""Downloads belong to the daemon: they are seen, joined, cancelled, and gone on with after a restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.appliance.downloads.jobs import DownloadJobs, Job
from inferd.appliance.downloads.progress import PullProgress
from inferd.appliance.downloads.source import Source, parse_source
from inferd.appliance.events.hub import EventHub
from inferd.appliance.library.errors import PullStopped, SourceNotFound
from inferd.appliance.library.library import Library
from inferd.appliance.library.records import ModelRecord


class PlayedPulls:
    """A pull that goes on until `finish`; `report` is called in its thread as a real one's is."""

    def __init__(self) -> None:
        self.finish = threading.Event()
        self.fails: Exception | None = None
        self.num_pulls = 0
        self.dropped: list[str] = []

    async def pull_async(
        self, source: Source, report: Callable[[PullProgress], None], *, name: str | None
    ) -> ModelRecord:
        self.num_pulls += 1
        return await asyncio.to_thread(self._pull, report)

    def _pull(self, report: Callable[[PullProgress], None]) -> ModelRecord:
        report(PullProgress("resolving"))
        done = 0
        while not self.finish.wait(0.005):
            done += 1
            report(PullProgress("downloading", "model.gguf", done, 1000, model="tiny"))
        if self.fails is not None:
            raise self.fails
        return ModelRecord(
            id="tiny",
            source="file:/x",
            revision=None,
            format="gguf",
            architecture="LlamaForCausalLM",
            path="models/x",
            size_bytes=1,
            quantisation=None,
            context_limit=8,
            created_at=1,
        )

    async def drop_parts_async(self, model: str) -> int:
        self.dropped.append(model)
        return 5


@pytest.fixture
def library(inferd_home: Path) -> Any:
    with Library.open(inferd_home) as opened:
        yield opened


@pytest.fixture
def pulls() -> PlayedPulls:
    return PlayedPulls()


@pytest.fixture
async def hub() -> EventHub:
    return EventHub(interval_s=0.001)


def make_jobs(library: Library, pulls: PlayedPulls, hub: EventHub) -> DownloadJobs:
    return DownloadJobs(pulls, library.database, hub)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - another thread's progress
            await asyncio.sleep(0.005)


def begin(jobs: DownloadJobs) -> Job:
    return jobs.begin(parse_source("file:/x"), None)


async def test_a_download_is_seen_and_a_second_asker_joins_it(
    library: Library, pulls: PlayedPulls, hub: EventHub
) -> None:
    jobs = make_jobs(library, pulls, hub)
    job = begin(jobs)
    assert begin(jobs) is job
    await until(lambda: job.record.done_bytes > 3)
    assert hub.records("downloads")[0]["model"] == "tiny"
    pulls.finish.set()
    await job.done.wait()
    assert (job.record.phase, job.record.model, pulls.num_pulls) == ("done", "tiny", 1)
    assert make_jobs(library, pulls, hub).resume() == []


async def test_a_cancelled_download_gives_its_bytes_back(library: Library, pulls: PlayedPulls, hub: EventHub) -> None:
    jobs = make_jobs(library, pulls, hub)
    job = begin(jobs)
    await until(lambda: job.record.done_bytes > 0)
    await jobs.cancel(job)
    assert (job.record.phase, pulls.dropped) == ("cancelled", ["tiny"])
    assert make_jobs(library, pulls, hub).resume() == []


async def test_the_next_daemon_goes_on_with_what_was_stopped(
    library: Library, pulls: PlayedPulls, hub: EventHub
) -> None:
    pulls.fails = PullStopped("stopping")
    job = begin(make_jobs(library, pulls, hub))
    pulls.finish.set()
    await job.done.wait()
    assert job.record.phase == "paused"
    pulls.fails = None
    (again,) = make_jobs(library, pulls, hub).resume()
    await again.done.wait()
    assert again.record.phase == "done"


@pytest.mark.parametrize("error", [SourceNotFound("no such model"), RuntimeError("a bug")])
async def test_a_failure_is_told_and_not_tried_for_ever(
    library: Library, pulls: PlayedPulls, hub: EventHub, error: Exception
) -> None:
    pulls.fails = error
    pulls.finish.set()
    job = begin(make_jobs(library, pulls, hub))
    await job.done.wait()
    assert job.record.phase == "failed"
    assert job.record.error
    assert make_jobs(library, pulls, hub).resume() == []
