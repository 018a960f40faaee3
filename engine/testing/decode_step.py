"""Decode steps without a scheduler, for tests that compare ways to run them."""

from __future__ import annotations

import numpy as np

from inferd.engine.worker.inputs import SharedRows, StepLayout


def decode_step(
    seq_lens: list[int],
    *,
    block_size: int,
    num_blocks: int,
    shared: list[SharedRows] | None = None,
    behind: tuple[int, ...] = (),
) -> StepLayout:
    """Rows of one random token each, in random blocks of their own but for the shared ones; block 0 is nobody's.

    The rows `behind` have not caught up with what is known of them.
    """
    draw = np.random.default_rng(len(seq_lens))
    count, width = len(seq_lens), -(-max(seq_lens) // block_size)
    tables = (draw.permutation(num_blocks - 1)[: count * width] + 1).astype(np.int32).reshape(count, width)
    for num_shared, rows in shared or []:
        tables[rows, :num_shared] = tables[rows[0], :num_shared]
    lens = np.array(seq_lens, np.int64)
    positions = lens - 1
    slots = tables[np.arange(count), positions // block_size] * np.int64(block_size) + positions % block_size
    caught_up = np.array([row for row in range(count) if row not in behind], np.int64)
    return StepLayout(
        query_lens=np.ones(count, np.int64),
        seq_lens=lens,
        token_ids=draw.integers(0, 250, count),
        positions=positions,
        slots=(slots,),
        block_tables=(tables,),
        shared_prefixes=shared or [],
        logits_indices=caught_up,
        sampled_rows=caught_up,
    )
