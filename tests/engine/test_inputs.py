"""A step's inputs against a slow reference that looks at one token after another."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from inferd.engine.core.output import KnownRequests, NewRequest, SchedulerOutput, SharedPrefix
from inferd.engine.errors import EngineError
from inferd.engine.params import SamplingParams
from inferd.engine.worker.inputs import StepInputs, StepLayout, dummy_layout, lay_out_step, to_inputs
from inferd.engine.worker.rows import InputBatch

CPU = torch.device("cpu")
BLOCK_SIZES = (4, 16)


@dataclass
class Case:
    token_ids: list[int]
    num_computed: int
    num_scheduled: int
    block_ids: tuple[list[int], ...]

    @property
    def seq_len(self) -> int:
        return self.num_computed + self.num_scheduled


def make_case(random_: random.Random, num_scheduled: int | None = None) -> Case:
    num_tokens = random_.randint(1, 90)
    num_computed = random_.randrange(num_tokens)
    scheduled = random_.randint(1, num_tokens - num_computed) if num_scheduled is None else num_scheduled
    blocks = tuple(
        random_.sample(range(1, 5000), -(-num_tokens // size) + random_.randint(0, 2)) for size in BLOCK_SIZES
    )
    return Case([random_.randrange(500) for _ in range(num_tokens)], num_computed, scheduled, blocks)


def prepare(
    cases: dict[str, Case], scheduled: list[str] | None = None, shared: list[SharedPrefix] | None = None
) -> tuple[StepLayout, StepInputs]:
    batch = InputBatch(32, 256, BLOCK_SIZES)
    for request_id, case in cases.items():
        batch.add(NewRequest(request_id, case.token_ids, 1, SamplingParams(), 0, case.block_ids, case.num_computed))
    counts = {request_id: cases[request_id].num_scheduled for request_id in (scheduled or list(cases))}
    output = SchedulerOutput(1, [], KnownRequests(), counts, sum(counts.values()), shared or [], [], [])
    layout = lay_out_step(batch, output)
    return layout, to_inputs(layout, CPU)


def check(prepared: tuple[StepLayout, StepInputs], cases: dict[str, Case], scheduled: list[str]) -> None:
    layout, inputs = prepared
    order = sorted(scheduled, key=lambda request_id: cases[request_id].num_scheduled > 1)  # stable
    rows = list(cases)  # nobody left: rows are in order of arrival
    token_ids, positions, logits_indices, sampled_rows = [], [], [], []
    for request_id in order:
        case = cases[request_id]
        span = range(case.num_computed, case.seq_len)
        positions += span
        token_ids += [case.token_ids[position] for position in span]
        if case.seq_len == len(case.token_ids):
            logits_indices.append(len(positions) - 1)
            sampled_rows.append(rows.index(request_id))
    assert inputs.token_ids.tolist() == token_ids
    assert inputs.positions.tolist() == positions
    assert inputs.logits_indices.tolist() == logits_indices
    assert layout.sampled_rows.tolist() == sampled_rows
    assert layout.is_decode == all(cases[request_id].num_scheduled == 1 for request_id in order)
    assert inputs.token_ids.dtype == inputs.positions.dtype == inputs.logits_indices.dtype == torch.int64
    for group, (geometry, size) in enumerate(zip(inputs.geometries, BLOCK_SIZES, strict=True)):
        assert geometry.query_lens == [cases[request_id].num_scheduled for request_id in order]
        assert geometry.seq_lens == [cases[request_id].seq_len for request_id in order]
        assert geometry.block_tables.dtype == torch.int32
        slots: list[int] = []
        for row, request_id in enumerate(order):
            case = cases[request_id]
            num_blocks = -(-case.seq_len // size)
            assert geometry.block_tables[row, :num_blocks].tolist() == case.block_ids[group][:num_blocks]
            for position in range(case.num_computed, case.seq_len):
                slots.append(case.block_ids[group][position // size] * size + position % size)
        assert geometry.slots.tolist() == slots
        assert geometry.positions is inputs.positions


@pytest.mark.parametrize("seed", range(20))
def test_mixed_batches(seed: int) -> None:
    random_ = random.Random(seed)
    only_one = 1 if seed % 4 == 0 else None
    cases = {f"r{index}": make_case(random_, only_one) for index in range(random_.randint(1, 12))}
    scheduled = random_.sample(list(cases), random_.randint(1, len(cases)))  # the others are alive and wait
    check(prepare(cases, scheduled), cases, scheduled)


def test_shared_prefixes_name_the_rows_of_the_step() -> None:
    blocks = (list(range(1, 12)), list(range(1, 4)))
    one, many = Case(list(range(40)), 39, 1, blocks), Case(list(range(40)), 20, 5, blocks)
    cases = {"a": one, "b": many, "c": one, "d": one}
    _, inputs = prepare(cases, ["d", "b", "a"], [SharedPrefix(3, ["b", "a"])])
    assert inputs.geometries[0].query_lens == [1, 1, 5]  # d, a, b: those with one token first
    assert inputs.geometries[0].shared_prefixes == [(3, [1, 2])]
    with pytest.raises(EngineError, match="'c' shares a prefix but was not scheduled"):
        prepare(cases, ["d", "b"], [SharedPrefix(3, ["c", "b"])])


def test_the_schedule_may_not_run_ahead_of_the_rows() -> None:
    unknown = SchedulerOutput(1, [], KnownRequests(), {"b": 1}, 1, [], [], [])
    with pytest.raises(EngineError, match="'b', which it does not hold"):
        lay_out_step(InputBatch(4, 256, BLOCK_SIZES), unknown)
    with pytest.raises(EngineError, match="'a' was scheduled up to token 4, the worker knows 3"):
        prepare({"a": Case([1, 2, 3], 2, 2, ([7], [8]))})
    with pytest.raises(EngineError, match="'a' was scheduled beyond its 1 blocks"):
        prepare({"a": Case(list(range(9)), 2, 5, ([7], [8]))})


@pytest.mark.parametrize("query_lens", [[1], [20, 9, 1, 1], [1, 1, 1]])
def test_dummy_inputs_store_nothing_and_read_block_0(query_lens: list[int]) -> None:
    inputs = to_inputs(dummy_layout(query_lens, BLOCK_SIZES), CPU)
    for geometry, size in zip(inputs.geometries, BLOCK_SIZES, strict=True):
        assert geometry.query_lens == geometry.seq_lens == query_lens
        assert geometry.slots.tolist() == [-1] * sum(query_lens)
        assert geometry.block_tables.shape == (len(query_lens), -(-max(query_lens) // size))
        assert not geometry.block_tables.any()
    assert (inputs.positions[inputs.logits_indices] + 1).tolist() == query_lens
    later = to_inputs(dummy_layout(query_lens, BLOCK_SIZES, context=30), CPU)
    assert later.positions.tolist() == (inputs.positions + 30).tolist()
    assert later.geometries[0].seq_lens == [length + 30 for length in query_lens]
    assert later.geometries[0].block_tables.shape[1] == -(-(max(query_lens) + 30) // BLOCK_SIZES[0])
