"""A pull from beginning to end: the one way by which a model comes into the library."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from inferd.appliance.downloads.digest import FileHasher, hash_file
from inferd.appliance.downloads.disk import Disk, full_disk_is_an_error_of_ours, sync_file, sync_folder
from inferd.appliance.downloads.importer import ModelImporter
from inferd.appliance.downloads.offer import Delivery, Offer, Provider, Staging
from inferd.appliance.downloads.progress import PullProgress, Report, ignore_progress
from inferd.appliance.downloads.retry import StopSignal
from inferd.appliance.downloads.select import GGUF_NAME, quantisation_of
from inferd.appliance.downloads.source import Scheme, Source, parse_source
from inferd.appliance.downloads.stagings import Stagings, size_of
from inferd.appliance.library.errors import LibraryError, ModelInUse, ModelNotFound, NameTaken, UnsupportedModel
from inferd.appliance.library.library import Library
from inferd.appliance.library.lock import LibraryLock
from inferd.appliance.library.names import check_name
from inferd.appliance.library.records import ModelFile, ModelRecord
from inferd.appliance.library.removal import Removed, remove_model

WAIT_STEP_S = 0.2  # how often a waiting pull looks at the stop signal
MAX_PULLS = 16  # of `pull_async` at a time, those that wait for another one of their model included
IMPORT_ROOM_BYTES = 64 << 20  # for the files that an import writes: the largest vocabularies take half of it


@dataclass(frozen=True)
class PullTools:
    """What a pull works with; `stop` ends all pulls of the service."""

    provider: Callable[[Scheme], Provider]  # called when first needed: some are slow to build
    importer: ModelImporter
    disk: Disk
    stop: StopSignal


class PullService:
    """Blocking, from any thread. Pulls of different models run side by side; two of one model are one download.

    Whenever a pull ends, also by `kill -9`, the library has the old model whole or the new one whole, and what has
    arrived of an unfinished one is used by the next.
    """

    def __init__(self, library: Library, tools: PullTools) -> None:
        self.library = library
        self._tools = tools
        self._stagings = Stagings(library)
        self._lock = LibraryLock(library.home)
        self._mutex = threading.Lock()
        self._providers: dict[Scheme, Provider] = {}
        self._model_locks: dict[str, threading.Lock] = {}
        # Threads of its own: a pull takes minutes, and whoever shares the event loop's threads would wait for it.
        self._threads = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="pull")

    def pull(self, source: Source | str, report: Report = ignore_progress, *, name: str | None = None) -> ModelRecord:
        """The model is in the library when this returns; one that is there already costs a question to its source.

        `name`: its id, instead of the one that the source suggests. `report` is called often, in this thread.
        Raises `LibraryError`.
        """
        parsed = parse_source(source) if isinstance(source, str) else source
        if name is not None:
            check_name(name)
        self._tools.stop.check()
        with full_disk_is_an_error_of_ours(self.library.home, str(parsed)), self._lock.held() as alone:
            if alone:
                self._stagings.sweep()
            report(PullProgress("resolving", str(parsed)))
            offer = self._provider(parsed.scheme).offer(parsed, report)
            if name is not None:
                offer = replace(offer, model_id=name, aliases=())
            tell = _naming(offer.model_id, report)
            with self._only_pull_of(offer.model_id, tell):
                return self._bring(offer, name, tell)

    async def pull_async(
        self, source: Source | str, report: Report = ignore_progress, *, name: str | None = None
    ) -> ModelRecord:
        """`pull` in a thread; `report` is called there. Cancelling the caller does not stop the pull: `stop` does."""
        pull = partial(self.pull, source, report, name=name)
        return await asyncio.get_running_loop().run_in_executor(self._threads, pull)

    def remove(self, name: str) -> Removed:
        """Takes a model out, or what an unfinished pull of that name has on disk. It must not be in use.

        Raises `ModelNotFound`, `ModelInUse` while it is being pulled, and `LibraryBusy`.
        """
        with self._lock.held():
            model = self.library.id_of(name) or name.lower()
            with self._not_while_pulled(model):
                parts_bytes = self._stagings.drop(model)
                if parts_bytes is not None and self.library.id_of(model) is None:
                    return Removed(model, parts_bytes)
                removed = remove_model(self.library, model)
                return msgspec.structs.replace(removed, freed_bytes=removed.freed_bytes + (parts_bytes or 0))

    def drop_parts(self, name: str) -> int:
        """Deletes what an unfinished pull has on disk; the bytes that this frees.

        Raises `ModelInUse` while it is being pulled, and `LibraryBusy`.
        """
        with self._lock.held(), self._not_while_pulled(name.lower()):
            return self._stagings.drop(name.lower()) or 0

    async def drop_parts_async(self, name: str) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.drop_parts, name)

    async def remove_async(self, name: str) -> Removed:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.remove, name)

    def stop(self) -> None:
        """Ends running pulls soon, with `PullStopped`; their parts stay. Does not wait for them."""
        self._tools.stop.set()

    def close(self) -> None:
        """`stop`, and returns when no pull uses the library any longer."""
        self.stop()
        self._threads.shutdown()

    def _provider(self, scheme: Scheme) -> Provider:
        with self._mutex:
            if scheme not in self._providers:
                self._providers[scheme] = self._tools.provider(scheme)
            return self._providers[scheme]

    @contextmanager
    def _only_pull_of(self, model_id: str, report: Report) -> Iterator[None]:
        lock = self._lock_of(model_id)
        if not lock.acquire(blocking=False):
            report(PullProgress("waiting", model_id))
            while not lock.acquire(timeout=WAIT_STEP_S):
                self._tools.stop.check()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _not_while_pulled(self, model_id: str) -> Iterator[None]:
        lock = self._lock_of(model_id)
        if not lock.acquire(blocking=False):
            raise ModelInUse(f"{model_id} is being pulled; wait for that")
        try:
            yield
        finally:
            lock.release()

    def _lock_of(self, model_id: str) -> threading.Lock:
        with self._mutex:
            return self._model_locks.setdefault(model_id, threading.Lock())

    def _bring(self, offer: Offer, name: str | None, report: Report) -> ModelRecord:
        old = self._owner(offer.model_id)
        if old is not None and self._is_whole(old, self._stagings.home_of(offer)):
            return old
        if old is not None and not _same_origin(old, offer.source):
            raise NameTaken(f"{old.id} is in the library from {old.source}; give this one another name with --name")
        staging = self._stagings.open(offer, name)
        try:
            record = self._fill(staging, offer, report)
        except UnsupportedModel:  # nor would it be served the next time
            self._stagings.close(staging)
            raise
        except LibraryError:
            self._stagings.close_if_empty(staging)
            raise
        return self._put_in_place(record, staging, old)

    def _fill(self, staging: Staging, offer: Offer, report: Report) -> ModelRecord:
        missing_bytes = max(offer.needed_bytes - size_of(staging.work.parent), 0)
        self._tools.disk.require(missing_bytes, self.library.models_folder, offer.model_id)
        delivery = offer.deliver(staging, report)
        self._stagings.keep_only(staging, delivery.files)
        return self._record(offer, delivery, staging, report)

    def _owner(self, model_id: str) -> ModelRecord | None:
        """The model of that id. Raises `NameTaken` where it is another model's alias."""
        try:
            record = self.library.find(model_id)
        except ModelNotFound:
            return None
        if record.id != model_id:
            raise NameTaken(f"{model_id} is an alias of {record.id}; give this model another name with --name")
        return record

    def _is_whole(self, record: ModelRecord, path: str) -> bool:
        """Whether the record is of this content, and the disk still has all of it."""
        folder = self.library.folder(record)
        return record.path == path and all(_has_size(folder / file.name, file.size_bytes) for file in record.files)

    def _record(self, offer: Offer, delivery: Delivery, staging: Staging, report: Report) -> ModelRecord:
        """Completes the folder with what the engine adds, and says what is in it."""
        quantisation = quantisation_of(delivery.weights_name)
        if delivery.format == "gguf":
            report(PullProgress("importing", delivery.weights_name))
            self._tools.disk.require(IMPORT_ROOM_BYTES, staging.model, f"importing {delivery.weights_name}")
            told = self._tools.importer.complete(staging.model / GGUF_NAME, staging.model)
            quantisation = quantisation or told
        config = self._tools.importer.check(staging.model)
        files = _with_digests(staging.model, delivery.files)
        return ModelRecord(
            id=offer.model_id,
            source=str(offer.source),
            revision=offer.revision,
            format=delivery.format,
            architecture=config.architecture,
            path=self._stagings.home_of(offer),
            size_bytes=sum(file.size_bytes for file in files),
            quantisation=quantisation,
            context_limit=config.max_position,
            created_at=int(time.time()),
            aliases=offer.aliases,
            files=files,
        )

    def _put_in_place(self, record: ModelRecord, staging: Staging, old: ModelRecord | None) -> ModelRecord:
        """One rename, then one row: before the row the old model is what the library has, after it the new one."""
        folder = self.library.folder(record)
        for path in staging.model.rglob("*"):
            (sync_folder if path.is_dir() else sync_file)(path)
        sync_folder(staging.model)
        self.library.discard(record.path)
        if folder.exists():  # what the row of a damaged model points to
            shutil.rmtree(folder)
        staging.model.rename(folder)
        sync_folder(folder.parent)
        stored = self.library.add(record)
        if old is not None and old.path != stored.path:
            self.library.erase(old.path)
        self._stagings.close(staging)
        return stored


def _naming(model: str, report: Report) -> Report:
    return lambda progress: report(msgspec.structs.replace(progress, model=model))


def _same_origin(record: ModelRecord, source: Source) -> bool:
    earlier = parse_source(record.source)
    return (earlier.scheme, earlier.name) == (source.scheme, source.name)


def _has_size(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes


def _with_digests(folder: Path, known: list[ModelFile]) -> tuple[ModelFile, ...]:
    """Every file of the folder; those that were not verified on arrival are small and hashed here."""
    files = {file.name: file for file in known}
    for path in filter(Path.is_file, folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name not in files:
            hasher = FileHasher(None, None)
            hash_file(path, hasher, lambda done: None)
            files[name] = ModelFile(name, path.stat().st_size, hasher.sha256)
    return tuple(files[name] for name in sorted(files))
