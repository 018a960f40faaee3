"""What stands in the prefix cache after a beginning: where another prompt with the same beginning leaves it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from inferd.engine.core.kv.hashing import BlockKey, split_block_key
from inferd.engine.insight.life import Divergence
from inferd.engine.request import Request

MAX_COMPARED = 4  # of the blocks that follow one beginning: the newest ones

Parent = bytes | tuple[str | None, ...]
"""The hash of the block before; before a request's first block, what else must be equal for blocks to be shared."""


@dataclass(frozen=True, slots=True)
class _Block:
    token_ids: array[int]
    parent: Parent
    request_id: str  # who computed it first


class Continuations:
    """Follows the blocks of one KV group that can be found, with their tokens (4 bytes each) and who computed them.

    Beginnings are compared only under the same cache salt: the first block's parent has it, every other's is a hash
    that depends on it.
    """

    def __init__(self, group: int, block_size: int) -> None:
        self._group = group
        self._block_size = block_size
        self._blocks: dict[bytes, _Block] = {}
        self._after: dict[Parent, list[bytes]] = {}  # the last `MAX_COMPARED`, the newest last

    def stored(self, request: Request, hashes: Sequence[bytes], places: range) -> None:
        """`hashes`: of all its blocks; those at `places` can be found from now on."""
        size, token_ids = self._block_size, request.token_ids
        for place in places:
            if hashes[place] in self._blocks:
                continue
            parent = hashes[place - 1] if place else _root(request)
            tokens = array("i", token_ids[place * size : (place + 1) * size])
            self._blocks[hashes[place]] = _Block(tokens, parent, request.request_id)
            after = self._after.setdefault(parent, [])
            after.append(hashes[place])
            del after[:-MAX_COMPARED]

    def removed(self, key: BlockKey) -> None:
        block_hash, group = split_block_key(key)
        block = self._blocks.pop(block_hash, None) if group == self._group else None
        if block is None or (after := self._after.get(block.parent)) is None or block_hash not in after:
            return
        after.remove(block_hash)
        if not after:
            del self._after[block.parent]

    def cleared(self) -> None:
        self._blocks.clear()
        self._after.clear()

    def find_divergence(self, request: Request, hashes: Sequence[bytes], num_found_tokens: int) -> Divergence | None:
        """Of its prompt; `hashes` are those of its full blocks. None when nothing of the prompt is cached, or all.

        What the request itself has stored already does not count.
        """
        size, prompt = self._block_size, request.token_ids[: request.num_prompt_tokens]
        place = num_found_tokens // size
        while place < len(hashes) and self._of_another(hashes[place], request) is not None:  # not in every group
            place += 1
        parent = hashes[place - 1] if place else _root(request)
        rest = prompt[place * size : (place + 1) * size]
        before = self._blocks.get(parent) if isinstance(parent, bytes) else None
        longest, request_id = 0, before.request_id if before is not None else None
        for block_hash in reversed(self._after.get(parent, [])):
            block = self._of_another(block_hash, request)
            if block is not None and (length := _common(block.token_ids, rest)) > longest:
                longest, request_id = length, block.request_id
        at = place * size + longest
        return Divergence(at, request_id) if 0 < at < len(prompt) else None

    def _of_another(self, block_hash: bytes, request: Request) -> _Block | None:
        block = self._blocks.get(block_hash)
        return block if block is not None and block.request_id != request.request_id else None


def _root(request: Request) -> Parent:
    return (request.cache_salt, request.lora.digest if request.lora is not None else None)


def _common(known: array[int], own: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(known, own, strict=False)):
        if a != b:
            return index
    return min(len(known), len(own))
