"""Drafts in the worker's rows: where they lie, which rows are sampled behind them, and what those rows know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from inferd.engine.core.output import KnownRequests, NewRequest, SchedulerOutput
from inferd.engine.errors import EngineError
from inferd.engine.params import SamplingParams
from inferd.engine.sampling.chain import ProcessorChain
from inferd.engine.sampling.processors import ProcessorContext
from inferd.engine.sampling.sampler import Sampler
from inferd.engine.spec.base import DraftRow
from inferd.engine.spec.drafting import Drafting
from inferd.engine.spec.rejection import NO_DRAFT
from inferd.engine.worker.inputs import lay_out_step
from inferd.engine.worker.rows import InputBatch

CPU = torch.device("cpu")
VOCAB = 30
BLOCK_SIZE = 4


def make_batch(max_model_len: int = 40, **requests: tuple[Sequence[int], int, dict[str, Any]]) -> InputBatch:
    """By name: tokens, how many of them are the prompt, sampling parameters. All but the last token are computed."""
    chain = ProcessorChain(ProcessorContext(VOCAB, 8, (2,), CPU))
    batch = InputBatch(8, max_model_len, [BLOCK_SIZE], chain)
    for index, (name, (token_ids, num_prompt, params)) in enumerate(requests.items()):
        blocks = (list(range(1 + 10 * index, 11 + 10 * index))[: max_model_len // BLOCK_SIZE],)
        known = SamplingParams(**params)
        batch.add(NewRequest(name, list(token_ids), num_prompt, known, 7 * index, blocks, len(token_ids) - 1))
    batch.condense()
    return batch


def schedule(drafts: dict[str, list[int]], **counts: int) -> SchedulerOutput:
    return SchedulerOutput(1, [], KnownRequests(), counts, sum(counts.values()), [], [], [], drafts)


def test_a_row_is_sampled_behind_each_draft() -> None:
    batch = make_batch(a=([5, 6, 7], 2, {}), b=([8], 1, {}), c=([9, 10, 11, 12], 3, {}))
    drafts = {"a": [20, 21], "c": [22]}
    batch.place_drafts(drafts)
    step = lay_out_step(batch, schedule(drafts, a=3, b=1, c=2))
    assert not step.is_decode
    assert step.token_ids.tolist() == [8, 7, 20, 21, 12, 22]  # rows with one token first
    assert step.positions.tolist() == [0, 2, 3, 4, 3, 4]
    assert step.slots[0].tolist() == [44, 6, 7, 8, 87, 88]
    assert step.seq_lens.tolist() == [1, 5, 5]
    assert step.logits_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert step.sampled_rows.tolist() == [1, 0, 0, 0, 2, 2]
    assert step.checks is not None
    assert step.checks.num_known.tolist() == [1, 3, 4, 5, 4, 5]
    assert step.checks.draft_ids.tolist() == [NO_DRAFT, 20, 21, NO_DRAFT, 22, NO_DRAFT]
    assert step.checks.starts.tolist() == [0, 1, 4]


def test_drafts_are_gone_with_the_next_step() -> None:
    batch = make_batch(a=([5, 6, 7], 2, {}))
    batch.place_drafts({"a": [20, 21]})
    batch.append_tokens(np.array([0]), np.array([23]), np.array([2]))  # the first of them, and another
    batch.place_drafts({})
    assert batch.token_ids[0, : batch.num_tokens[0]].tolist() == [5, 6, 7, 20, 23]
    batch.num_computed_tokens[0] = 4
    step = lay_out_step(batch, schedule({}, a=1))
    assert step.checks is None
    assert step.is_decode
    assert step.token_ids.tolist() == [23]


def test_drafts_may_fill_a_context() -> None:
    """The last place is for the token that is sampled on top of them, and a draft has none behind it."""
    batch = make_batch(max_model_len=8, a=([5, 6, 7, 8, 9], 2, {}))
    batch.place_drafts({"a": [20, 21]})
    step = lay_out_step(batch, schedule({"a": [20, 21]}, a=3))
    assert step.checks is not None
    assert step.checks.num_known.tolist() == [5, 6, 7]
    batch.append_tokens(np.array([0]), np.array([23]), np.array([3]))
    assert batch.token_ids[0].tolist() == [5, 6, 7, 8, 9, 20, 21, 23]
    with pytest.raises(EngineError, match="above max_model_len=8"):
        batch.place_drafts({"a": [1]})


def test_a_schedule_beyond_the_drafts_is_an_error() -> None:
    batch = make_batch(a=([5, 6, 7], 2, {}))
    batch.place_drafts({"a": [20]})
    with pytest.raises(EngineError, match="'a' was scheduled up to token 5, the worker knows 4"):
        lay_out_step(batch, schedule({"a": [20]}, a=3))


class Recorder:
    """A drafter that has no idea."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, list[int], list[int], int]] = []

    def follow(self, output: SchedulerOutput) -> None:
        """Nothing to do."""

    def propose(self, rows: Sequence[DraftRow]) -> dict[str, list[int]]:
        self.rows = [(row.request_id, row.token_ids.tolist(), row.block_ids.tolist(), row.num_wanted) for row in rows]
        return {}


def test_who_drafts_sees_what_has_been_computed_or_sampled() -> None:
    """Of a prompt that comes in chunks no more than that, and nothing is wanted of it yet."""
    batch = make_batch(a=([5, 6, 7], 2, {}), b=([8, 9, 10, 11, 12], 5, {}), c=([13], 1, {}))
    batch.num_computed_tokens[1] = 0
    recorder = Recorder()
    drafting = Drafting(recorder)
    output = schedule({"a": [20, 21]}, a=3, b=3, c=1)
    output.num_drafts_wanted = {"a": 2, "b": 4}
    batch.place_drafts(output.drafts)
    drafting.begin(output, batch)
    batch.append_tokens(np.array([0, 2]), np.array([23, 24]), np.array([2, 1]))
    drafting.finish(batch)
    assert recorder.rows == [
        ("a", [5, 6, 7, 20, 23], list(range(1, 11)), 2),
        ("b", [8, 9, 10], list(range(11, 21)), 0),
    ]


WISHES: list[dict[str, Any]] = [
    dict(repetition_penalty=1.6, temperature=0.0),
    dict(presence_penalty=1.5, frequency_penalty=0.7, temperature=0.8),
    dict(bad_words_token_ids=[[20, 21], [6, 7, 4]], temperature=0.0),
    dict(min_tokens=3, stop_token_ids=[9], temperature=0.7, top_p=0.9),
]


@pytest.mark.parametrize("wish", WISHES)
def test_a_row_behind_drafts_is_sampled_as_if_they_had_come(wish: dict[str, Any]) -> None:
    """Step by step: some drafts stand, some do not, and the next ones follow on what came instead."""
    text, drafted = [5, 6, 7, 20], [[20, 21, 6], [7, 20, 20], [21], [], [6, 7, 5]]
    logits = torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(3)) * 2
    batch = make_batch(a=(text, 2, wish))
    for drafts in drafted:
        batch.place_drafts({"a": drafts} if drafts else {})
        num_known = len(text) + np.arange(len(drafts) + 1)
        rows = np.zeros(len(num_known), np.intp)
        picked = Sampler()(logits[: len(rows)].clone(), batch.sampling_batch(rows, CPU, num_known)).tolist()
        for index, token_id in enumerate(picked):
            alone = make_batch(a=([*text, *drafts[:index]], 2, wish)).sampling_batch(np.array([0]), CPU)
            assert Sampler()(logits[index : index + 1].clone(), alone).tolist() == [token_id]
        num_stand = min(len(drafts), 1)
        batch.append_tokens(np.array([0]), np.array([8]), np.array([num_stand + 1]))
        text += [*drafts[:num_stand], 8]
        assert batch.token_ids[0, : len(text)].tolist() == text
