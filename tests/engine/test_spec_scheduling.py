"""Drafts in the scheduler: whatever is guessed, requests get their own tokens, and every block comes back.

The executor has no model. It stores a digest of the tokens before it in each slot and looks at all of them in each
step, so that what a refused draft left behind is found where it would be read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.engine.config import EngineConfig, SpeculativeConfig
from inferd.engine.core.kv.plan import blocks_of_one
from inferd.engine.core.output import SchedulerOutput
from inferd.engine.core.step import EngineCore
from inferd.engine.messages import AddRequest, FinishReason
from inferd.engine.params import SamplingParams
from inferd.engine.testing.fake_executor import FakeExecutor, NextToken, scrambled
from inferd.engine.testing.jobs import Job, Run, run_jobs

MAX_MODEL_LEN = 40
VOCAB = 13
NEXT_TOKEN = scrambled(VOCAB)
NUM_TOKENS = 4  # of a draft
JOBS = st.lists(
    st.tuples(
        st.integers(0, 6),  # joins at this step
        st.integers(0, 20),  # how much of a common beginning it has
        st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12),
        st.integers(1, 24),  # output tokens
    ),
    min_size=1,
    max_size=7,
)


class FallibleDrafter:
    """Knows what comes next, and says something else in a share of the places."""

    def __init__(self, accuracy: float, next_token: NextToken = NEXT_TOKEN) -> None:
        self._accuracy = accuracy
        self._next_token = next_token

    def __call__(self, token_ids: Sequence[int], num_wanted: int) -> list[int]:
        rng, known = random.Random(len(token_ids)), list(token_ids)
        for _ in range(num_wanted):
            token_id = self._next_token(known)
            known.append(token_id if rng.random() < self._accuracy else (token_id + 1) % VOCAB)
        return known[len(token_ids) :]


def alone(job: Job) -> list[int]:
    token_ids = list(job.prompt)
    for _ in range(job.params.max_tokens or 0):
        token_ids.append(NEXT_TOKEN(token_ids))
    return token_ids[len(job.prompt) :]


def make_jobs(drawn: list[tuple[int, int, list[int], int]]) -> list[Job]:
    beginning = [3 + place * 7 % 10 for place in range(20)]
    return [
        Job(
            f"job-{index}",
            (*beginning[:length], *tail)[: MAX_MODEL_LEN - 1],
            SamplingParams(
                temperature=0.0, max_tokens=min(max_tokens, MAX_MODEL_LEN - length - len(tail)), ignore_eos=True
            ),
            joins_at_step,
        )
        for index, (joins_at_step, length, tail, max_tokens) in enumerate(drawn)
    ]


class Watched(FakeExecutor):
    """Looks at every step for what must hold of its drafts."""

    on_step: Callable[[], None]

    def execute_model(self, output: SchedulerOutput) -> Any:
        self.on_step()
        for request_id, drafts in output.drafts.items():
            row = self.worker.rows[request_id] if self.worker is not None else None
            assert row is not None
            assert drafts
            assert output.num_scheduled_tokens[request_id] == 1 + len(drafts)
            # One more token is sampled on top of them.
            assert len(row.token_ids) + len(drafts) + 1 <= row.num_prompt_tokens + (row.params.max_tokens or 0)
        return super().execute_model(output)


@pytest.fixture
def make_config(make_core_config: Callable[..., EngineConfig]) -> Callable[..., EngineConfig]:
    def make(*, lookahead: bool = False, num_tokens: int = NUM_TOKENS, **changes: Any) -> EngineConfig:
        options: dict[str, Any] = dict(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, num_blocks=500)
        config = make_core_config(
            num_speculative_tokens=num_tokens,
            num_lookahead_tokens=num_tokens if lookahead else 0,
            **(options | changes),
        )
        model = config.model if lookahead else None  # what drafts needs slots ahead
        return replace(config, speculative=SpeculativeConfig("draft", num_tokens, 1, 1, 10, model))

    return make


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8), (1,)])
@pytest.mark.parametrize("lookahead", [False, True], ids=["", "lookahead"])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=JOBS,
    budget=st.sampled_from([1, 3, 7, 64]),
    threshold=st.sampled_from([0, 2]),
    spare_blocks=st.sampled_from([0, 3, 60]),
    caching=st.booleans(),
    ahead=st.booleans(),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_every_request_gets_what_it_would_get_alone(
    make_config: Callable[..., EngineConfig],
    windows: tuple[int | None, ...],
    lookahead: bool,
    drawn: list[tuple[int, int, list[int], int]],
    budget: int,
    threshold: int,
    spare_blocks: int,
    caching: bool,
    ahead: bool,
    accuracy: float,
) -> None:
    config = make_config(
        lookahead=lookahead,
        budget=budget,
        enable_prefix_caching=caching,
        async_scheduling=ahead,
        long_prefill_token_threshold=threshold,
    )
    groups = EngineCore(config, FakeExecutor(windows=windows)).kv_cache_config.groups
    needed = 1 + blocks_of_one(groups, MAX_MODEL_LEN, max_step_tokens=config.scheduler.max_uncomputed_tokens)
    config = replace(config, cache=replace(config.cache, num_blocks=needed + spare_blocks))
    executor = Watched(windows=windows, next_token=NEXT_TOKEN, draft=FallibleDrafter(accuracy))
    core = EngineCore(config, executor)
    executor.on_step = lambda: check_held(core, needed - 1)
    jobs = make_jobs(drawn)
    run = run_jobs(core, jobs)
    assert run.tokens == {job.request_id: alone(job) for job in jobs}
    check_counts(run, accuracy)
    assert core.reset_prefix_cache()


def check_held(core: EngineCore, most: int) -> None:
    """What the plan counts on: one request alone always finds room."""
    for request in core._scheduler.running:
        assert core._scheduler._kv.num_blocks_held(request.request_id) <= most


def check_counts(run: Run, accuracy: float) -> None:
    drafted, accepted = run.stats.drafted, run.stats.accepted
    assert len(drafted) == len(accepted) <= NUM_TOKENS
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert accepted == sorted(accepted, reverse=True)
    if accuracy == 1.0:
        assert accepted == drafted
    if accuracy == 0.0:
        assert not any(accepted)


JOB = Job("job", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True))


def run_one(config: EngineConfig, accuracy: float, job: Job = JOB) -> Run:
    return run_jobs(EngineCore(config, FakeExecutor(next_token=NEXT_TOKEN, draft=FallibleDrafter(accuracy))), [job])


def test_good_drafts_save_steps(make_config: Callable[..., EngineConfig]) -> None:
    run = run_one(make_config(), 1.0)
    assert [len(output.new_token_ids) for output in run.outputs["job"]] == [1, 5, 5, 5, 5]
    assert run.stats.drafted == run.stats.accepted == [4, 4, 4, 4]


def test_what_is_left_of_a_request_cuts_its_drafts(make_config: Callable[..., EngineConfig]) -> None:
    run = run_one(make_config(), 1.0, replace(JOB, params=SamplingParams(max_tokens=8, ignore_eos=True)))
    assert [len(output.new_token_ids) for output in run.outputs["job"]] == [1, 5, 2]
    assert run.stats.drafted == [2, 1, 1, 1]


def test_bad_drafts_cost_less_and_less(make_config: Callable[..., EngineConfig]) -> None:
    """They stop after a few, and are tried again after a pause."""
    config = make_config(max_model_len=512, num_blocks=200)
    run = run_one(config, 0.0, replace(JOB, params=SamplingParams(max_tokens=400, ignore_eos=True)))
    assert run.stats.generated_tokens == 400
    assert sum(run.stats.drafted) < 60
    assert not any(run.stats.accepted)


def test_a_stop_among_the_drafts_ends_the_request_there(make_config: Callable[..., EngineConfig]) -> None:
    expected = alone(JOB)
    stop = expected[3]
    params = SamplingParams(max_tokens=21, ignore_eos=True, stop_token_ids=[stop])
    run = run_one(make_config(), 1.0, replace(JOB, params=params))
    assert run.tokens["job"] == expected[: expected.index(stop) + 1]
    assert run.reasons["job"] is FinishReason.STOP
    assert run.outputs["job"][-1].stop_reason == stop


def test_drafts_get_what_the_budget_has_left(make_config: Callable[..., EngineConfig]) -> None:
    """Everybody's next token comes first."""
    config = make_config(budget=14)
    jobs = [replace(JOB, request_id=f"job-{index}") for index in range(4)]
    executor = FakeExecutor(next_token=NEXT_TOKEN, draft=FallibleDrafter(1.0))
    run_jobs(EngineCore(config, executor), jobs)
    full = [output for output in executor.outputs if len(output.num_scheduled_tokens) == 4 and not output.new]
    assert full
    assert [len(drafts) for drafts in full[0].drafts.values()] == [4, 4, 2]


@pytest.mark.parametrize("drafts", [False, True])
def test_nobody_is_preempted_for_a_draft(make_config: Callable[..., EngineConfig], drafts: bool) -> None:
    """The second request's next token has room, its drafts do not; its blocks suffice once the first one is done."""
    first = Job("first", (5, 6, 7, 8), SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True))
    second = replace(first, request_id="second", prompt=(6, 6, 7, 8), joins_at_step=9)
    config = make_config(lookahead=True, num_blocks=1 + 6, max_model_len=20)
    if not drafts:
        config = replace(config, speculative=None)
    executor = FakeExecutor(next_token=NEXT_TOKEN, draft=FallibleDrafter(0.0))
    run = run_jobs(EngineCore(config, executor), [first, second])
    assert run.stats.preemptions == 0
    assert run.tokens == {job.request_id: alone(job) for job in (first, second)}
    assert drafts == any(output.drafts for output in executor.outputs)


def test_the_plan_counts_drafts_of_layers_with_a_window(make_config: Callable[..., EngineConfig]) -> None:
    """Also where a step computes no more than one token of a prompt."""
    config = make_config(num_tokens=9, long_prefill_token_threshold=1)
    executor = Watched(windows=(1,), next_token=NEXT_TOKEN, draft=FallibleDrafter(1.0))
    core = EngineCore(config, executor)
    step_tokens = config.scheduler.max_uncomputed_tokens
    most = blocks_of_one(core.kv_cache_config.groups, MAX_MODEL_LEN, max_step_tokens=step_tokens)
    executor.on_step = lambda: check_held(core, most)
    assert run_jobs(core, [JOB]).stats.accepted[8] > 0


def test_slots_for_making_drafts_are_reserved(make_config: Callable[..., EngineConfig]) -> None:
    """Behind the tokens of each step, as long as the request has use for them."""
    executor = FakeExecutor(next_token=NEXT_TOKEN, draft=FallibleDrafter(0.0))
    core = EngineCore(make_config(lookahead=True), executor)
    core.add(AddRequest(JOB.request_id, list(JOB.prompt), JOB.params, 0.0))
    seen = 0
    while core.has_work:
        output = core.step()
        wanted = executor.outputs[-1].num_drafts_wanted.get("job", 0)
        if executor.outputs[-1].known.request_ids and wanted and not output.outputs[0].finish_reason:
            assert executor.worker is not None
            row = executor.worker.rows["job"]
            assert len(row.block_ids[0]) * 4 >= row.num_computed_tokens + wanted
            seen += 1
    assert seen > 0


def test_a_request_that_may_get_drafts_is_not_scheduled_ahead(make_config: Callable[..., EngineConfig]) -> None:
    """Others are: here the one that is paused for bad drafts."""
    config = make_config(async_scheduling=True, max_model_len=128, num_blocks=100)
    executor = FakeExecutor(next_token=NEXT_TOKEN, draft=FallibleDrafter(0.0))
    run_jobs(EngineCore(config, executor), [replace(JOB, params=SamplingParams(max_tokens=60, ignore_eos=True))])
    asked = [output.step for output in executor.outputs if output.num_drafts_wanted]
    assert 0 < len(asked) < 30
