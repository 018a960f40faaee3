"""Random loads on engines whose layers have windows: each query finds what it looks at, and every block comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.engine.core.kv.plan import blocks_of_one
from inferd.engine.core.step import EngineCore
from inferd.engine.messages import KVBlocksRemoved, KVBlocksStored, KVCacheCleared, KVEvent
from inferd.engine.params import SamplingParams
from inferd.engine.testing.fake_executor import FakeExecutor, scrambled
from inferd.engine.testing.jobs import Job, run_jobs

MAX_MODEL_LEN = 40
VOCAB = 13
NEXT_TOKEN = scrambled(VOCAB)
JOBS = st.lists(
    st.tuples(
        st.integers(0, 6),  # joins at this step
        st.integers(0, 3),  # beginning, of those that many share
        st.integers(0, 20),  # how much of it
        st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12),
        st.integers(1, 7),
    ),
    min_size=1,
    max_size=8,
)


def alone(job: Job) -> list[int]:
    token_ids = list(job.prompt)
    for _ in range(job.params.max_tokens or 0):
        token_ids.append(NEXT_TOKEN(token_ids))
    return token_ids[len(job.prompt) :]


def make_jobs(drawn: list[tuple[int, int, int, list[int], int]]) -> list[Job]:
    beginnings = [[3 + (start * 7 + place) % 10 for place in range(20)] for start in range(4)]
    return [
        Job(
            f"job-{index}",
            (*beginnings[start][:length], *tail),
            SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            joins_at_step,
        )
        for index, (joins_at_step, start, length, tail, max_tokens) in enumerate(drawn)
    ]


def follow(known: set[tuple[int, bytes]], events: list[KVEvent]) -> None:
    for event in events:
        match event:
            case KVBlocksStored():
                known.update((event.group, block_hash) for block_hash in event.block_hashes)
            case KVBlocksRemoved():
                known.difference_update((event.group, block_hash) for block_hash in event.block_hashes)
            case KVCacheCleared():
                known.clear()


class Followed(EngineCore):
    """Believes its own events."""

    known: set[tuple[int, bytes]]

    def step(self, *args: Any) -> Any:
        outputs = super().step(*args)
        follow(self.known, outputs.kv_events)
        return outputs


@pytest.mark.parametrize("windows", [(8,), (None, 8), (None, 3, 9), (1,)])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=JOBS,
    budget=st.sampled_from([1, 3, 7, 64]),
    spare_blocks=st.sampled_from([0, 5, 60]),
    caching=st.booleans(),
    ahead=st.booleans(),
)
def test_every_request_gets_what_it_would_get_alone(
    make_core_config: Callable[..., Any],
    windows: tuple[int | None, ...],
    drawn: list[tuple[int, int, int, list[int], int]],
    budget: int,
    spare_blocks: int,
    caching: bool,
    ahead: bool,
) -> None:
    config = make_core_config(
        budget=budget, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=caching, vocab_size=VOCAB, num_blocks=500
    )
    limits = replace(config.scheduler, async_scheduling=ahead)
    config = replace(config, scheduler=limits, cache=replace(config.cache, enable_kv_events=True))
    groups = EngineCore(config, FakeExecutor(windows=windows)).kv_cache_config.groups
    needed = 1 + blocks_of_one(groups, MAX_MODEL_LEN, max_step_tokens=limits.max_uncomputed_tokens)
    config = replace(config, cache=replace(config.cache, num_blocks=needed + spare_blocks))
    core = Followed(config, FakeExecutor(windows=windows, next_token=NEXT_TOKEN))
    core.known = set()
    jobs = make_jobs(drawn)
    assert run_jobs(core, jobs).tokens == {job.request_id: alone(job) for job in jobs}
    assert bool(core.known) <= caching
    assert core.reset_prefix_cache()
    follow(core.known, core.take_kv_events())
    assert core.known == set()
