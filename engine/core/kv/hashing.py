"""Names for the content of full blocks: a SHA-256 chain over tokens and whatever else shaped their keys and values.

`hash_i = sha256(hash_{i-1} | token ids | extra keys)`, and a seed of the engine stands before the first block. A
cryptographic hash, because a collision would show one caller another caller's context.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NewType

from inferd.engine.messages import MultimodalFeature
from inferd.engine.request import BlockHasher, Request

BlockKey = NewType("BlockKey", bytes)
"""A block hash with the KV group that holds the block: equal tokens in two groups are two different contents."""

_TOKEN_BYTES = array("q").itemsize
_GROUP_BYTES = 2
_LORA, _FEATURE, _SALT = b"L", b"F", b"S"


def make_block_key(block_hash: bytes, group_id: int) -> BlockKey:
    return BlockKey(block_hash + group_id.to_bytes(_GROUP_BYTES, "little"))


def split_block_key(key: BlockKey) -> tuple[bytes, int]:
    """(block hash, KV group)"""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "little")


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


def hash_block(parent: bytes, packed_tokens: bytes, extra_keys: bytes = b"") -> bytes:
    """Hash of one full block. Blocks of one chain have one length, so the three parts cannot run into each other."""
    return sha256(parent + packed_tokens + extra_keys).digest()


def make_extra_keys(
    start: int,
    end: int,
    *,
    adapter: str | None = None,
    features: Sequence[MultimodalFeature] | None = None,
    cache_salt: str | None = None,
) -> bytes:
    """What besides token ids decides the keys and values of positions [start, end).

    The digest of an adapter stands in every block, a feature in each block that it touches, and the salt in the first
    block alone: the chain carries it on. A feature's offset is taken relative to the block, so its place inside counts.
    """
    keys = b"" if adapter is None else _LORA + _sized(adapter)
    for feature in features or ():
        if feature.offset < end and feature.offset + feature.length > start:
            keys += _FEATURE + _sized(feature.digest) + struct.pack("<q", feature.offset - start)
    if start == 0 and cache_salt is not None:
        keys += _SALT + _sized(cache_salt)
    return keys


def make_block_hasher(hash_block_size: int, seed: bytes) -> BlockHasher:
    """The function that hashes those blocks of a request which became full since its last call.

    It changes nothing: the caller appends the result to `request.block_hashes`. `seed` makes hashes differ between
    engines, so that nobody can prepare a collision.
    """
    root = sha256(b"inferd block chain" + seed).digest()

    def hash_new_blocks(request: Request) -> list[bytes]:
        known = request.block_hashes
        start = len(known) * hash_block_size
        if len(request.token_ids) - start < hash_block_size:
            return []
        parent = known[-1] if known else root
        return _chain(request, start, parent, hash_block_size)

    return hash_new_blocks


def _chain(request: Request, start: int, parent: bytes, hash_block_size: int) -> list[bytes]:
    packed = pack_tokens(request.token_ids[start:])
    block_bytes = hash_block_size * _TOKEN_BYTES
    features, salt = request.features, request.cache_salt
    adapter = request.lora.digest if request.lora is not None else None
    has_extra_keys = bool(features) or adapter is not None or (salt is not None and start == 0)
    extra_keys = b""
    hashes: list[bytes] = []
    for index in range(len(packed) // block_bytes):
        if has_extra_keys:
            begin = start + index * hash_block_size
            end = begin + hash_block_size
            extra_keys = make_extra_keys(begin, end, adapter=adapter, features=features, cache_salt=salt)
        parent = hash_block(parent, packed[index * block_bytes : (index + 1) * block_bytes], extra_keys)
        hashes.append(parent)
    return hashes


def _sized(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(data)) + data
