"""The draft model's own part: what it computes, where it stores it, and what it does without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from inferd.engine.core.output import KnownRequests, NewRequest, SchedulerOutput
from inferd.engine.params import SamplingParams
from inferd.engine.spec.base import DraftRow
from inferd.engine.spec.coverage import Coverage
from inferd.engine.spec.draft import DraftLimits, DraftModel
from inferd.engine.spec.passes import Piece, cut_into_passes, lay_out_pass
from inferd.engine.worker.forward import StepLogits
from inferd.engine.worker.inputs import StepLayout
from inferd.kernels.sampling.reference import greedy

VOCAB = 20
BLOCK_SIZE = 4
NUM_BLOCKS = 12


class Successor:
    """A model that says n + 1 after n. It keeps what is stored in each slot, and looks at all of it in each pass."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.slots: dict[int, int] = {}
        self.num_tokens: list[int] = []  # of each pass
        self._vocab_size = vocab_size

    def run(self, step: StepLayout) -> StepLogits | None:
        self.num_tokens.append(len(step.token_ids))
        self.slots |= dict(zip(step.slots[0].tolist(), step.token_ids.tolist(), strict=True))
        ends = step.query_lens.cumsum()
        for row, length in enumerate(step.seq_lens.tolist()):
            table = step.block_tables[0][row]
            places = [int(table[at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE for at in range(length)]
            stored = [self.slots[place] for place in places]
            assert stored == list(range(stored[0], stored[0] + length)), "a row reads what is not of its text"
            assert step.token_ids[ends[row] - 1] == stored[-1]
        if not len(step.logits_indices):
            return None
        following = (step.token_ids[step.logits_indices] + 1) % self._vocab_size
        return StepLogits(torch.nn.functional.one_hot(torch.from_numpy(following), self._vocab_size).float())

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def make_model(
    forward: Successor, *, max_positions: int = 40, max_pass_tokens: int = 64, vocab_size: int = VOCAB
) -> DraftModel:
    limits = DraftLimits(vocab_size, VOCAB, max_positions, max_pass_tokens)
    return DraftModel(forward, greedy, NUM_BLOCKS, BLOCK_SIZE, limits)


def row(token_ids: Sequence[int], blocks: Sequence[int], num_wanted: int = 3, request_id: str = "a") -> DraftRow:
    return DraftRow(request_id, np.array(token_ids, np.int32), np.array(blocks, np.int32), num_wanted)


def step(
    *, new: Sequence[tuple[str, int, list[int]]] = (), known: Sequence[list[int]] = (), gone: Sequence[str] = ()
) -> SchedulerOutput:
    """`new`: request id, tokens that were found, blocks. `known`: new blocks of somebody."""
    return SchedulerOutput(
        1,
        [NewRequest(name, [0], 1, SamplingParams(), 0, (blocks,), found) for name, found, blocks in new],
        KnownRequests([str(i) for i, _ in enumerate(known)], [(ids,) for ids in known], [0] * len(known)),
        {},
        0,
        [],
        [],
        list(gone),
    )


def test_all_rows_are_drafted_for_in_the_same_passes() -> None:
    forward = Successor()
    model = make_model(forward)
    found = model.propose([row([1, 2, 3], [1, 2]), row([9], [3], 2, "b"), row([5, 6, 7, 8], [4, 5], 1, "c")])
    assert found == {"a": [4, 5, 6], "b": [10, 11], "c": [9]}
    assert forward.num_tokens == [8, 2, 1]


def test_only_what_is_new_is_computed() -> None:
    forward = Successor()
    model = make_model(forward)
    assert model.propose([row([1, 2, 3], [1, 2, 3])]) == {"a": [4, 5, 6]}
    forward.num_tokens.clear()
    # All three stood, and one came on top: the last draft was never fed back.
    assert model.propose([row([1, 2, 3, 4, 5, 6, 7], [1, 2, 3])]) == {"a": [8, 9, 10]}
    assert forward.num_tokens == [2, 1, 1]


def test_what_refused_drafts_left_is_written_over() -> None:
    forward = Successor()
    model = make_model(forward)
    model.propose([row([1, 2, 3], [1, 2, 3])])
    forward.slots.update({place: -1 for place in forward.slots if place >= 1 * BLOCK_SIZE + 3})
    forward.num_tokens.clear()
    model._stored["a"].drafts[0] = 17  # as if it had said so, and 4 came in its place; then two more without drafts
    assert model.propose([row([1, 2, 3, 4, 5, 6], [1, 2, 3])]) == {"a": [7, 8, 9]}
    assert forward.num_tokens == [3, 1, 1]


def test_a_prompt_in_chunks_is_followed() -> None:
    forward = Successor()
    model = make_model(forward)
    prompt = list(range(1, 11))
    assert model.propose([row(prompt[:4], [1, 2, 3], 0)]) == {}
    assert model.propose([row(prompt[:8], [1, 2, 3], 0)]) == {}
    assert model.propose([row(prompt, [1, 2, 3], 1)]) == {"a": [11]}
    assert forward.num_tokens == [4, 4, 2]


def test_blocks_that_were_found_are_not_computed_again() -> None:
    forward = Successor()
    model = make_model(forward)
    text = list(range(1, 11))
    model.follow(step(new=[("a", 0, [1, 2, 3])]))
    model.propose([row(text, [1, 2, 3], 1)])
    model.follow(step(new=[("b", 8, [1, 2, 5])], gone=["a"]))
    forward.num_tokens.clear()
    assert model.propose([row(text, [1, 2, 5], 1, "b")]) == {"b": [11]}
    assert forward.num_tokens == [2]


def test_found_blocks_that_it_did_not_fill_are_computed_after_all() -> None:
    """Whoever filled them got no drafts then, or their memory belonged to another text before."""
    forward = Successor()
    model = make_model(forward)
    model.follow(step(new=[("old", 0, [1, 2])]))
    model.propose([row(list(range(7, 14)), [1, 2], 1, "old")])
    model.follow(step(new=[("a", 0, [1, 2, 3])], gone=["old"]))  # which got none
    model.follow(step(new=[("b", 8, [1, 2, 5])]))
    forward.num_tokens.clear()
    assert model.propose([row(list(range(1, 11)), [1, 2, 5], 1, "b")]) == {"b": [11]}
    assert forward.num_tokens == [10]


def test_a_row_may_read_what_one_before_it_stores_in_the_same_pass() -> None:
    forward = Successor()
    model = make_model(forward, max_pass_tokens=6)
    model.follow(step(new=[("a", 0, [1, 2, 3]), ("b", 8, [1, 2, 5])]))
    text = list(range(1, 10))
    assert model.propose([row(text, [1, 2, 3], 1), row([*text, 10], [1, 2, 5], 1, "b")]) == {"a": [10], "b": [11]}
    assert forward.num_tokens == [6, 5]


def test_a_preempted_request_starts_over() -> None:
    forward = Successor()
    model = make_model(forward)
    model.follow(step(new=[("a", 0, [1, 2])]))
    model.propose([row([1, 2, 3], [1, 2])])
    model.follow(step(gone=["a"], known=[[1, 2]]))
    model.follow(step(new=[("a", 0, [6, 7])]))
    forward.num_tokens.clear()
    assert model.propose([row([1, 2, 3], [6, 7], 1)]) == {"a": [4]}
    assert forward.num_tokens == [3]


@pytest.mark.parametrize(
    ("blocks", "max_positions", "expected"),
    [
        ([1, 2], 40, {"a": [8, 9]}),  # the last guess needs no slot
        ([1, 2, 3], 7, {"a": [8]}),
        ([1, 2, 3], 6, {}),
        ([1], 40, {}),
    ],
)
def test_drafts_end_where_there_is_no_more_room(
    blocks: list[int], max_positions: int, expected: dict[str, list[int]]
) -> None:
    model = make_model(Successor(), max_positions=max_positions)
    assert model.propose([row(list(range(1, 8)), blocks)]) == expected


def test_ids_that_only_one_of_the_models_has() -> None:
    """The model's own ids may reach further than the draft model's, and the other way round."""
    assert make_model(Successor(), vocab_size=6).propose([row([3, 4], [1, 2])]) == {"a": [5]}
    wide = make_model(Successor(), vocab_size=VOCAB + 5)
    assert wide.propose([row([VOCAB + 3], [1, 2], 1)]) == {"a": [1]}  # read as 0


def test_logits_that_are_no_numbers_end_a_draft() -> None:
    class Broken(Successor):
        def run(self, step: StepLayout) -> StepLogits | None:
            result = super().run(step)
            if result is not None:
                result.logits[step.token_ids[step.logits_indices] == 5] = torch.nan
            return result

    assert make_model(Broken()).propose([row([3], [1, 2]), row([9], [3, 4], 3, "b")]) == {
        "a": [4, 5],
        "b": [10, 11, 12],
    }


def test_coverage_is_of_the_first_tokens() -> None:
    coverage = Coverage(NUM_BLOCKS, BLOCK_SIZE)
    table = np.array([3, 5, 7], np.int32)
    assert coverage.num_covered(table) == 0
    coverage.store(table, 6)
    assert coverage.num_covered(table) == 6
    coverage.store(table, 12)
    assert coverage.num_covered(table) == 12
    assert coverage.num_covered(table[:1]) == 4
    coverage.store(table, 9)  # nothing goes
    assert coverage.num_covered(table) == 12
    coverage.reset([5])
    assert coverage.num_covered(table) == 4


def test_passes_hold_so_many_tokens_in_order() -> None:
    pieces = [
        Piece(index, np.arange(length), 10, np.zeros(1, np.int32), True) for index, length in enumerate([5, 1, 7])
    ]
    passes = list(cut_into_passes(pieces, 4))
    parts = [
        [(piece.index, piece.start, len(piece.token_ids), piece.wants_next) for piece in batch] for batch in passes
    ]
    assert parts == [
        [(0, 10, 4, False)],
        [(0, 14, 1, True), (1, 10, 1, True), (2, 10, 2, False)],
        [(2, 12, 4, False)],
        [(2, 16, 1, True)],
    ]


def test_a_pass_has_single_tokens_first_and_says_whose_logits_are_whose() -> None:
    tables = [np.array([2, 3, 9], np.int32), np.array([5], np.int32), np.array([7, 8], np.int32)]
    pieces = [
        Piece(0, np.array([11, 12]), 3, tables[0], True),
        Piece(1, np.array([13]), 0, tables[1], True),
        Piece(2, np.array([14, 15, 16]), 2, tables[2], False),
    ]
    layout, wanting = lay_out_pass(pieces, BLOCK_SIZE)
    assert wanting == [1, 0]
    assert layout.token_ids.tolist() == [13, 11, 12, 14, 15, 16]
    assert layout.positions.tolist() == [0, 3, 4, 2, 3, 4]
    assert layout.slots[0].tolist() == [20, 11, 12, 30, 31, 32]
    assert layout.seq_lens.tolist() == [1, 5, 5]
    assert layout.logits_indices.tolist() == [0, 2]
    assert layout.block_tables[0].tolist() == [[5, 0], [2, 3], [7, 8]]
