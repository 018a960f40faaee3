"""Makes reads of memory that nobody wrote visible."""

from __future__ import annotations

import torch

from inferd.engine.worker.worker import Worker


def poison_kv_cache(worker: Worker) -> None:
    """Fill all KV memory, the null block included and a draft model's too, with NaN. For a worker that has not run
    yet."""
    for cache in (*worker.kv_caches.values(), *worker.speculation.kv_caches.values()):
        cache.fill_(torch.nan)
