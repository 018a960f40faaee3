"""The persistent batch against a dict of requests: whatever joins, leaves and moves, each row stays its request's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from inferd.engine.core.output import KnownRequests, NewRequest
from inferd.engine.errors import EngineError
from inferd.engine.params import SamplingParams
from inferd.engine.worker.rows import InputBatch

MAX_NUM_SEQS = 12
MAX_MODEL_LEN = 3000
BLOCK_SIZES = (4, 16)  # two KV groups


def new_request(request_id: str, num_tokens: int = 5, **changes: Any) -> NewRequest:
    fields: dict[str, Any] = dict(
        request_id=request_id,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        params=SamplingParams(),
        seed=0,
        block_ids=([1], [1]),
        num_computed_tokens=0,
    )
    return NewRequest(**(fields | changes))


def make_batch(**changes: Any) -> InputBatch:
    fields: dict[str, Any] = dict(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, block_sizes=BLOCK_SIZES)
    return InputBatch(**(fields | changes))


@dataclass
class Oracle:
    """What a row must hold."""

    new: NewRequest
    token_ids: list[int]
    num_computed: int
    block_ids: tuple[list[int], ...] = field(default_factory=lambda: ([], []))


class Fuzz:
    """Drives a batch and the oracle through the same random steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.batch = make_batch()
        self.alive: dict[str, Oracle] = {}
        self.forgotten: list[str] = []
        self.num_made = 0

    def step(self) -> None:
        for request_id in self.random.sample(sorted(self.alive), self.random.randint(0, len(self.alive)) // 2):
            self.batch.remove(request_id)
            del self.alive[request_id]
            self.forgotten.append(request_id)
        for _ in range(self.random.randint(0, MAX_NUM_SEQS - len(self.alive))):
            self.add()
        self.batch.condense()
        self.update()
        self.sample()

    def add(self) -> None:
        if self.forgotten and self.random.random() < 0.3:  # a resumed request, or an id used again
            request_id = self.forgotten.pop(self.random.randrange(len(self.forgotten)))
        else:
            request_id = f"r{self.num_made}"
            self.num_made += 1
        num_tokens = self.random.choice([1, 7, 40, 1025, 2000])
        new = new_request(
            request_id,
            token_ids=[self.random.randrange(1000) for _ in range(num_tokens)],
            num_prompt_tokens=self.random.randint(1, num_tokens),
            params=self.params(),
            seed=self.random.randrange(-(2**63), 2**63),
            block_ids=tuple(self.blocks(num_tokens // size) for size in BLOCK_SIZES),
            num_computed_tokens=self.random.randrange(num_tokens),
        )
        blocks = tuple(list(ids) for ids in new.block_ids)
        self.batch.add(new)
        self.alive[request_id] = Oracle(new, list(new.token_ids), new.num_computed_tokens, blocks)

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.random.choice([0.0, 0.5, 1.25]),
            top_k=self.random.choice([0, 5]),
            top_p=self.random.choice([1.0, 0.5]),
            min_p=self.random.choice([0.0, 0.1]),
            logprobs=self.random.choice([None, 0, 3]),
        )

    def blocks(self, count: int) -> list[int]:
        return [self.random.randrange(1, 10_000) for _ in range(count)]

    def update(self) -> None:
        known = KnownRequests()
        for request_id in self.random.sample(sorted(self.alive), self.random.randint(0, len(self.alive))):
            oracle = self.alive[request_id]
            oracle.num_computed = self.random.randrange(2000)
            more = (
                None if self.random.random() < 0.5 else tuple(self.blocks(self.random.randint(0, 2)) for _ in range(2))
            )
            for mine, ids in zip(oracle.block_ids, more or ([], []), strict=True):
                mine.extend(ids)
            known.request_ids.append(request_id)
            known.num_computed_tokens.append(oracle.num_computed)
            known.new_block_ids.append(more)
        self.batch.update(known)

    def sample(self) -> None:
        ids = self.random.sample(sorted(self.alive), self.random.randint(0, len(self.alive)))
        tokens = [self.random.randrange(1000) for _ in ids]
        self.batch.append_tokens(np.array([self.batch.row(id_) for id_ in ids], np.intp), np.array(tokens, np.int64))
        for request_id, token in zip(ids, tokens, strict=True):
            self.alive[request_id].token_ids.append(token)

    def check(self) -> None:
        batch = self.batch
        assert len(batch) == len(self.alive)
        rows = {request_id: batch.row(request_id) for request_id in self.alive}
        assert sorted(rows.values()) == list(range(len(rows)))  # no holes after condense
        for request_id, oracle in self.alive.items():
            row = rows[request_id]
            assert batch.request_ids[row] == request_id
            assert batch.token_ids[row, : batch.num_tokens[row]].tolist() == oracle.token_ids
            assert batch.num_prompt_tokens[row] == oracle.new.num_prompt_tokens
            assert batch.num_computed_tokens[row] == oracle.num_computed
            for table, ids in zip(batch.block_tables, oracle.block_ids, strict=True):
                assert table.ids[row, : table.num_blocks[row]].tolist() == ids
            self.check_sampling(row, oracle)

    def check_sampling(self, row: int, oracle: Oracle) -> None:
        """As in a batch made for this request alone."""
        fresh = make_batch()
        new = oracle.new
        fresh.add(new_request(new.request_id, params=new.params, seed=new.seed))
        fresh.num_tokens[0], fresh.num_prompt_tokens[0] = len(oracle.token_ids), new.num_prompt_tokens
        found = self.batch.sampling_batch(np.array([row]), torch.device("cpu"))
        assert repr(found) == repr(fresh.sampling_batch(np.array([0]), torch.device("cpu")))


@pytest.mark.parametrize("seed", range(6))
def test_fuzz_against_a_dict_of_requests(seed: int) -> None:
    fuzz = Fuzz(seed)
    for _ in range(40):
        fuzz.step()
        fuzz.check()


def test_an_added_request_fills_a_hole_before_anything_moves() -> None:
    batch = make_batch()
    for name in "abc":
        batch.add(new_request(name))
    batch.remove("b")
    assert batch.add(new_request("d")) == 1
    batch.condense()
    assert [batch.row(name) for name in "adc"] == [0, 1, 2]


def test_condense_moves_the_last_rows_down() -> None:
    batch = make_batch()
    for name in "abcde":
        batch.add(new_request(name))
    for name in "ade":
        batch.remove(name)
    batch.condense()
    assert {batch.row("b"), batch.row("c")} == {0, 1}
    assert "a" not in batch
    assert batch.add(new_request("f")) == 2


def test_drift_from_the_scheduler_is_an_error() -> None:
    batch = make_batch(max_num_seqs=2, max_model_len=20)
    batch.add(new_request("a"))
    batch.remove("never seen")
    with pytest.raises(EngineError, match="'a' was sent to the worker as new"):
        batch.add(new_request("a"))
    with pytest.raises(EngineError, match="'b', which it does not hold"):
        batch.update(KnownRequests(["b"], [None], [3]))
    with pytest.raises(EngineError, match="21 tokens, above max_model_len=20"):
        batch.add(new_request("b", num_tokens=21))
    with pytest.raises(EngineError, match="a row got 6 blocks of 4 tokens, room is for 5"):
        batch.update(KnownRequests(["a"], [([2, 3, 4, 5, 6], [])], [3]))
    batch.add(new_request("c"))
    with pytest.raises(EngineError, match="max_num_seqs=2"):
        batch.add(new_request("d"))
