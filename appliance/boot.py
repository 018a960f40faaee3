"""What a daemon does between listening and answering: find a model (pull one, if there is none) and load it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from inferd.appliance.downloads.manager import PullService
from inferd.appliance.downloads.progress import Report
from inferd.appliance.library.records import ModelRecord
from inferd.appliance.supervisor.catalog import Catalog, record_of_folder
from inferd.appliance.supervisor.errors import ModelUnavailable
from inferd.appliance.supervisor.served import ServedModel
from inferd.appliance.supervisor.supervisor import Supervisor
from inferd.engine.errors import EngineError

SOURCE_PREFIXES = ("pypi:", "hf:", "file:")
ASK_AGAIN_S = 1.0


def names_folder(model: str | None) -> bool:
    return model is not None and not model.startswith(SOURCE_PREFIXES) and Path(model).expanduser().is_dir()


def folder_records(model: str | None) -> tuple[ModelRecord, ...]:
    """A record for `model` when it is a folder. Raises `LoadError` for a folder without a model in it."""
    return (record_of_folder(Path(model)),) if model is not None and names_folder(model) else ()


async def find_model(
    wanted: str | None, default_source: str, catalog: Catalog, pulls: PullService, report: Report
) -> ModelRecord:
    """The model to start with. Raises `UnknownModel`, `LibraryError`, `LoadError`."""
    if wanted is not None and wanted.startswith(SOURCE_PREFIXES):
        return await pulls.pull_async(wanted, report)
    if wanted is not None and not names_folder(wanted):
        return catalog.find(wanted)
    known = catalog.list_models()
    return known[0] if known else await pulls.pull_async(default_source, report)


async def wait_ready(supervisor: Supervisor[ServedModel], model: str) -> ServedModel:
    """Loads it and waits through crashes; raises the `EngineError` of a start that would fail again."""
    while True:
        try:
            return await supervisor.ensure_ready(model)
        except ModelUnavailable as unavailable:
            if unavailable.retry_after_s is None or unavailable.code == "draining":
                raise
            slot = supervisor.slot(model)
            error = slot.failure.error if slot is not None and slot.failure is not None else None
            if isinstance(error, EngineError) and not error.retryable:
                raise error from None
        await asyncio.sleep(ASK_AGAIN_S)
