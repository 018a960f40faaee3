"""Who has which block of KV memory, run by run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec.structs import replace

from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.kv.pool import KVCacheBlock
from inferd.engine.insight.records import BlockMap, BlockOwner, BlockRun
from inferd.engine.request import Request


def draw_blocks(kv: KVCacheManager, running: Iterable[Request], now: float) -> BlockMap:
    """Takes time in proportion to the number of blocks. `running`: in the order in which shared blocks are told as
    theirs."""
    users: dict[int, str] = {}
    for request in running:
        for table in kv.block_ids(request.request_id):
            for block_id in table:
                users.setdefault(block_id, request.request_id)
    runs = [replace(alike, count=sum(1 for _ in group)) for alike, group in groupby(_alone(kv.blocks, users, now))]
    return BlockMap(now, len(kv.blocks), runs)


def _alone(blocks: Iterable[KVCacheBlock], users: dict[int, str], now: float) -> Iterator[BlockRun]:
    """Each block as a run of its own."""
    for block in blocks:
        if block.is_null:
            yield BlockRun(BlockOwner.NULL, 1)
        elif block.ref_count:
            yield BlockRun(BlockOwner.USED, 1, users.get(block.block_id), block.ref_count)
        elif block.block_hash is not None:
            yield BlockRun(BlockOwner.CACHED, 1, age_s=max(int(now - block.freed_at), 0))
        else:
            yield BlockRun(BlockOwner.FREE, 1)
