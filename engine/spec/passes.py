"""The draft model's passes over its own rows, as the layouts that a `Forward` runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferd.engine.worker.inputs import StepLayout


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one request, to be computed in one pass."""

    index: int  # of the request, among those that are drafted for
    token_ids: NDArray[np.int64]  # [c]
    start: int  # position of the first of them
    block_ids: NDArray[np.int32]
    wants_next: bool  # the token behind the last of them is asked for


def cut_into_passes(pieces: Sequence[Piece], most_tokens: int) -> Iterator[list[Piece]]:
    """Passes of at most `most_tokens`, in order: what one request stores, those after it may read."""
    batch: list[Piece] = []
    room = most_tokens
    for piece in pieces:
        left = piece
        while len(left.token_ids) > room:
            head, left = _split(left, room)
            yield [*batch, head] if room else batch
            batch, room = [], most_tokens
        batch.append(left)
        room -= len(left.token_ids)
    if batch:
        yield batch


def _split(piece: Piece, at: int) -> tuple[Piece, Piece]:
    head = Piece(piece.index, piece.token_ids[:at], piece.start, piece.block_ids, False)
    tail = Piece(piece.index, piece.token_ids[at:], piece.start + at, piece.block_ids, piece.wants_next)
    return head, tail


def lay_out_pass(pieces: Sequence[Piece], block_size: int) -> tuple[StepLayout, list[int]]:
    """The layout, and the request index of each row of its logits. Rows with one token come first."""
    pieces = sorted(pieces, key=lambda piece: len(piece.token_ids) > 1)
    query_lens = np.array([len(piece.token_ids) for piece in pieces], np.int64)
    starts = np.array([piece.start for piece in pieces], np.int64)
    ends = query_lens.cumsum()
    positions = np.arange(ends[-1]) + (starts - ends + query_lens).repeat(query_lens)
    num_columns = -(-int((starts + query_lens).max()) // block_size)
    table = np.zeros((len(pieces), num_columns), np.int32)
    for row, piece in enumerate(pieces):
        used = piece.block_ids[:num_columns]
        table[row, : len(used)] = used
    token_rows = np.arange(len(pieces)).repeat(query_lens)
    slots = table[token_rows, positions // block_size] * np.int64(block_size) + positions % block_size
    wanting = np.array([piece.wants_next for piece in pieces], np.bool_)
    layout = StepLayout(
        query_lens=query_lens,
        seq_lens=starts + query_lens,
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        positions=positions,
        slots=(slots,),
        block_tables=(table,),
        shared_prefixes=[],
        logits_indices=ends[wanting] - 1,
        sampled_rows=np.zeros(0, np.intp),
    )
    return layout, [piece.index for piece in pieces if piece.wants_next]
