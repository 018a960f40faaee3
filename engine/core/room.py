"""Room for requests: what one needs to start, what others give up for it, and what guesses may have."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.core.admission import Refusal, WaitReason
from inferd.engine.core.batch import StepBatch
from inferd.engine.core.kv.manager import KVCacheManager
from inferd.engine.core.ledger import Ledger
from inferd.engine.core.output import BlockIds
from inferd.engine.core.queue import RequestQueue
from inferd.engine.core.speculation import Speculation
from inferd.engine.core.waiting import WaitingRoom
from inferd.engine.request import Request, RequestStatus


def admit(
    request: Request, batch: StepBatch, kv: KVCacheManager, ledger: Ledger, waiting: WaitingRoom
) -> Refusal | None:
    """Start a waiting request, if all of it fits: half-admitted prompts would evict each other.

    Blocks that running requests still need for what they know are not free for it.
    """
    if request.num_output_placeholders:
        return Refusal(WaitReason.TOKEN_ON_ITS_WAY, request.num_output_placeholders)
    computed = kv.get_computed_blocks(request)
    needed = kv.num_blocks_needed(request, computed)
    available = kv.num_free_blocks - batch.num_claimed_blocks
    if needed > available:
        return Refusal(WaitReason.KV_FULL, needed, max(available, 0))
    behind = request.num_tokens - computed.num_tokens
    num_new_tokens = batch.cut(behind)
    if not num_new_tokens:
        return Refusal(WaitReason.TOKEN_BUDGET, behind, batch.budget)
    if kv.allocate_slots(request, num_new_tokens, computed) is None:
        return Refusal(WaitReason.KV_FULL, needed, max(available, 0))
    ledger.admitted(request, computed.num_tokens)
    request.num_computed_tokens = computed.num_tokens
    request.status = RequestStatus.RUNNING
    waiting.take(request)
    batch.add_new(request, num_new_tokens, kv.block_ids(request.request_id))
    if num_new_tokens < behind:
        batch.num_claimed_blocks += kv.num_blocks_missing(request)
    return None


def those_who_yield(
    request: Request, running: Sequence[Request], queue: RequestQueue, kv: KVCacheManager
) -> list[Request]:
    """Of the running requests, those of a lower class than a waiting one; nobody, when not even all their blocks would
    let it in."""
    better = queue.standing(request)[0]
    lower = [other for other in running if queue.standing(other)[0] > better]
    most_free = kv.num_free_blocks + sum(kv.num_blocks_held(victim.request_id) for victim in lower)
    fits = kv.num_blocks_needed(request, kv.get_computed_blocks(request)) <= most_free
    return lower if fits else []


def allocate_for_drafts(
    request: Request, num_new_tokens: int, drafts: list[int], speculation: Speculation, kv: KVCacheManager
) -> BlockIds | None:
    """Blocks for the next tokens, the drafts on top, and what making the next ones needs; None when there are none of
    the latter or no room. Nobody has to go for a guess: then `drafts` are cleared."""
    num_lookahead = speculation.num_lookahead_tokens(request)
    if not (drafts or num_lookahead):
        return None
    new_block_ids = kv.allocate_slots(request, num_new_tokens + len(drafts), num_lookahead_tokens=num_lookahead)
    if new_block_ids is None:
        drafts.clear()
    return new_block_ids
