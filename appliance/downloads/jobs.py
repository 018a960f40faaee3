"""Downloads that belong to the daemon: they go on when whoever asked is gone, and after a restart."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from inferd.appliance.downloads.manager import PullService
from inferd.appliance.downloads.progress import PullProgress
from inferd.appliance.downloads.source import Source, parse_source
from inferd.appliance.events.hub import EventHub
from inferd.appliance.library.db import LibraryDatabase
from inferd.appliance.library.errors import LibraryError, PullCancelled, PullStopped, Unexpected
from inferd.appliance.library.records import ModelRecord
from inferd.appliance.schemas import DownloadRecord

KEPT_ENDED = 30
SPEED_OVER_S = 2.0
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """One download. `record` is what everybody sees; `done` is set when it has ended, well or not."""

    record: DownloadRecord
    source: Source
    name: str | None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    progress: PullProgress | None = None  # the latest
    model: ModelRecord | None = None
    error: LibraryError | None = None
    is_cancelled: bool = False
    _mark: tuple[float, int] = (0.0, 0)  # since when the speed is measured, and from how many bytes on

    def advance(self, progress: PullProgress) -> None:
        now, record = time.monotonic(), self.record
        self.progress = progress
        if (record.phase, record.file) != (progress.phase, progress.file):
            self._mark = (now, progress.bytes_done)
        since, first = self._mark
        speed = record.bytes_per_s
        if now - since >= SPEED_OVER_S:
            speed = max(progress.bytes_done - first, 0) / (now - since)
            self._mark = (now, progress.bytes_done)
        left = (progress.bytes_total or 0) - progress.bytes_done
        self.record = msgspec.structs.replace(
            record,
            model=progress.model or record.model,
            phase=progress.phase,
            file=progress.file,
            done_bytes=progress.bytes_done,
            total_bytes=progress.bytes_total,
            bytes_per_s=round(speed),
            eta_s=round(left / speed, 1) if speed > 0 and left > 0 else None,
        )


class DownloadJobs:
    """On the event loop; the pulls themselves run in threads."""

    def __init__(
        self,
        pulls: PullService,
        database: LibraryDatabase,
        hub: EventHub,
        on_model: Callable[[ModelRecord], None] = lambda model: None,
    ) -> None:
        self._pulls = pulls
        self._database = database
        self._hub = hub
        self._on_model = on_model
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def jobs(self) -> list[Job]:
        """Oldest first."""
        return list(self._jobs.values())

    def find(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def begin(self, source: Source, name: str | None) -> Job:
        """Starts it, or joins the one that runs already."""
        for job in self._jobs.values():
            if (str(job.source), job.name) == (str(source), name) and not job.done.is_set():
                return job
        job = Job(DownloadRecord(id=secrets.token_hex(4), source=str(source), started_at=time.time()), source, name)
        with self._database.writing() as db:
            values = [job.record.id, str(source), name]
            db.conn.execute("INSERT INTO downloads (id, source, name) VALUES (?, ?, ?)", values)
        self._run(job)
        return job

    def resume(self) -> list[Job]:
        """Those that a daemon before this one did not bring to their end."""
        with self._database.reading() as db:
            rows = db.conn.execute("SELECT id, source, name FROM downloads ORDER BY rowid").fetchall()
        found = [
            Job(DownloadRecord(id=job_id, source=source, started_at=time.time()), parse_source(source), name)
            for job_id, source, name in rows
            if job_id not in self._jobs
        ]
        for job in found:
            log.info("going on with the download of %s", job.source)
            self._run(job)
        return found

    async def cancel(self, job: Job) -> None:
        """Ends it and gives its bytes back; one that has ended is let be."""
        job.is_cancelled = True
        await job.done.wait()

    def _run(self, job: Job) -> None:
        self._jobs[job.record.id] = job
        while len(self._jobs) > KEPT_ENDED and (oldest := next(iter(self._jobs.values()))).done.is_set():
            del self._jobs[oldest.record.id]
            self._hub.drop("downloads", oldest.record.id)
        task = asyncio.create_task(self._pull(job), name=f"download {job.source}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pull(self, job: Job) -> None:
        loop = asyncio.get_running_loop()

        def report(progress: PullProgress) -> None:  # in the pull's thread
            if job.is_cancelled:
                raise PullCancelled(f"the download of {job.source} was cancelled")
            loop.call_soon_threadsafe(self._advanced, job, progress)

        try:
            job.model = await self._pulls.pull_async(job.source, report, name=job.name)
            self._ended(job, "done")
            self._on_model(job.model)
        except PullStopped as error:  # the daemon ends; the next one goes on with it
            job.error = error
            self._publish(job, msgspec.structs.replace(job.record, phase="paused"))
            job.done.set()
        except PullCancelled as error:
            job.error = error
            await self._reclaim(job)
            self._ended(job, "cancelled")
        except LibraryError as error:
            job.error = error
            self._ended(job, "failed", str(error))
        except Exception:
            log.exception("the download of %s failed", job.source)
            job.error = Unexpected()
            self._ended(job, "failed", str(job.error))

    async def _reclaim(self, job: Job) -> None:
        model = job.record.model
        if not model:
            return
        freed = await self._pulls.drop_parts_async(model)
        log.info("the download of %s was cancelled; %d bytes are free again", job.source, freed)

    def _advanced(self, job: Job, progress: PullProgress) -> None:
        if not job.done.is_set():
            job.advance(progress)
            self._hub.put("downloads", job.record)

    def _ended(self, job: Job, phase: str, error: str | None = None) -> None:
        with self._database.writing() as db:
            db.conn.execute("DELETE FROM downloads WHERE id = ?", [job.record.id])
        model = job.model.id if job.model is not None else job.record.model
        record = msgspec.structs.replace(
            job.record, phase=phase, model=model, ended_at=time.time(), bytes_per_s=0.0, eta_s=None, error=error
        )
        self._publish(job, record)
        job.done.set()

    def _publish(self, job: Job, record: DownloadRecord) -> None:
        job.record = record
        self._hub.put("downloads", record)
