"""Which requests share first blocks: pure choice over block tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter

from inferd.engine.core.output import SharedPrefix

Member = tuple[Sequence[int], str]  # block ids, request id

MAX_LEVELS = 4  # of groups inside groups; bounds the time, and each further level has less to save

_ids = itemgetter(0)


def choose_shared_prefixes(members: Sequence[Member], unfilled: Collection[int]) -> list[SharedPrefix]:
    """Disjoint groups of two or more requests with equal leading blocks, chosen so that many block reads are saved.

    A group of k requests over n blocks saves n * (k - 1) reads. Requests that share more among themselves become a
    group of their own where that saves more than joining the larger group. No prefix reaches into `unfilled`, the
    blocks whose content is computed only by the step that is being built.
    """
    return [prefix for bucket in _split(members, 0) for prefix in _choose(bucket, unfilled, MAX_LEVELS)[1]]


def cut_to_common(
    prefixes: Sequence[SharedPrefix], tables: Mapping[str, Sequence[int]], unfilled: Collection[int]
) -> list[SharedPrefix]:
    """Those prefixes as far as they are equal in another KV group too, whose block tables are given by request."""
    cut = []
    for prefix in prefixes:
        members = [(tables[request_id][: prefix.num_blocks], request_id) for request_id in prefix.request_ids]
        num_blocks, _ = _common_blocks(members, unfilled)
        if num_blocks:
            cut.append(SharedPrefix(num_blocks, prefix.request_ids))
    return cut


def _choose(members: Sequence[Member], unfilled: Collection[int], levels: int) -> tuple[int, list[SharedPrefix]]:
    """Reads saved, and the groups that save them, for members that have at least their first block in common."""
    num_blocks, is_cut = _common_blocks(members, unfilled)
    chosen: list[SharedPrefix] = []
    saved = 0
    joined = [member[1] for member in members]
    for branch in [] if is_cut or levels == 1 else _split(members, num_blocks):
        branch_saved, prefixes = _choose(branch, unfilled, levels - 1)
        if branch_saved > num_blocks * len(branch):
            saved += branch_saved
            chosen += prefixes
            apart = {member[1] for member in branch}
            joined = [request_id for request_id in joined if request_id not in apart]
    if num_blocks and len(joined) > 1:
        saved += num_blocks * (len(joined) - 1)
        chosen.append(SharedPrefix(num_blocks, joined))
    return saved, chosen


def _common_blocks(members: Sequence[Member], unfilled: Collection[int]) -> tuple[int, bool]:
    """Length of the prefix common to all, and whether an unfilled block cut it short.

    What the smallest and the largest table share, all tables between them share.
    """
    smallest, largest = min(members, key=_ids)[0], max(members, key=_ids)[0]
    for index, (a, b) in enumerate(zip(smallest, largest, strict=False)):
        if a != b:
            return index, False
        if a in unfilled:
            return index, True
    return min(len(smallest), len(largest)), False


def _split(members: Sequence[Member], index: int) -> list[list[Member]]:
    """Members by the block at `index` of their tables; those alone there are left out."""
    buckets: defaultdict[int, list[Member]] = defaultdict(list)
    for member in members:
        if len(member[0]) > index:
            buckets[member[0][index]].append(member)
    return [bucket for bucket in buckets.values() if len(bucket) > 1]
