"""An engine's feed: what is told, when, and that it adds up to the records themselves. Blocks hold 4 tokens."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.core.insight.feed import MAX_INTERVAL_S, MIN_INTERVAL_S
from inferd.engine.core.output import GraphUse, KnownRequests, ModelRunnerOutput, SchedulerOutput
from inferd.engine.core.pipeline import Landed
from inferd.engine.insight.histogram import STEP_TOKENS_BUCKETS
from inferd.engine.insight.mirror import FeedMirror, PendingFeed
from inferd.engine.insight.records import BlockOwner, RequestState, StepShare, StepTokens, apply_fields
from inferd.engine.messages import Call
from inferd.engine.testing.clock import FakeClock, TimedExecutor

WORDS = range(10, 97)


@pytest.fixture
def make_timed(make_core):
    """(core, clock); every step takes `step_s`."""

    def make(step_s=0.125, **options):
        clock = FakeClock()
        executor = TimedExecutor(clock, step_s, **options.pop("executor", {}))
        return make_core(executor=executor, clock=clock, **options), clock

    return make


def call(core, method, *args):
    reply = core.call(Call(1, method, list(args)))
    assert reply is None or reply.error is None, reply
    return reply.result if reply is not None else None


def updates(core, times):
    """Steps, and what they tell."""
    return [feed for _ in range(times) if (feed := core.step().feed) is not None]


class TestLife:
    def test_states_and_times_of_a_life(self, make_timed, make_add):
        core, clock = make_timed(budget=4)
        clock.advance(5)
        core.add(make_add("a", range(10, 20), max_tokens=4, ignore_eos=True, name="chat-1", client="ann", priority=3))
        seen = [core.insight.records()[0]]
        call(core, "subscribe")
        ended = None
        while core.has_work:
            update = core.step().feed
            seen += core.insight.records()
            for fields in update.requests if update is not None else []:
                if "finished_at" in fields:
                    ended = apply_fields(seen[-1], fields)
        states = [record.state.value for record in seen]
        assert states == ["waiting", "prefill", "prefill", "decode", "decode", "decode"]
        assert [record.computed_tokens for record in seen] == [0, 4, 8, 10, 11, 12]
        assert [record.kv_blocks for record in seen] == [0, 1, 2, 3, 3, 3]
        first = seen[0]
        assert (first.name, first.client, first.priority, first.context_limit) == ("chat-1", "ann", 3, 64)
        assert (first.prompt_tokens, first.max_tokens, first.admitted_at) == (10, 4, 1005.0)
        assert ended is not None
        assert (ended.state, ended.finish_reason, ended.output_tokens) == (RequestState.FINISHED, "length", 4)
        assert (ended.first_scheduled_at, ended.first_token_at) == (1005.0, 1005.375)
        assert (ended.last_token_at, ended.finished_at) == (1005.75, 1005.75)
        assert (ended.kv_blocks, ended.kv_blocks_peak, ended.batch_size) == (0, 4, 0)
        assert ended.tokens_per_s == 8.0

    def test_states_of_a_life_with_a_preemption(self, make_timed, make_add):
        core, _ = make_timed(num_blocks=6, max_model_len=20)
        for name, length in (("a", 8), ("b", 11)):
            core.add(make_add(name, range(length, 2 * length), max_tokens=6, ignore_eos=True))
        states = []
        while core.has_work:
            core.step()
            states += [record.state.value for record in core.insight.records() if record.id == "b"]
        runs = [state for at, state in enumerate(states) if at == 0 or states[at - 1] != state]
        assert runs == ["decode", "preempted", "decode"]

    def test_the_end_of_one_that_is_cancelled(self, make_timed, make_add):
        core, _ = make_timed()
        call(core, "subscribe")
        core.add(make_add("a", max_tokens=20, ignore_eos=True))
        updates(core, 2)
        call(core, "cancel", "a")
        (update,) = updates(core, 1)
        assert (update.requests[-1]["state"], update.requests[-1]["finish_reason"]) == ("cancelled", "abort")

    def test_the_end_of_one_that_fails(self, make_timed, make_add):
        core, _ = make_timed()
        call(core, "subscribe")
        core.add(make_add("a", max_tokens=20))
        updates(core, 2)
        core._outbox += core._scheduler.fail({"a": "the model computed nonsense"})
        (update,) = updates(core, 1)
        assert (update.requests[-1]["state"], update.requests[-1]["error"]) == ("failed", "the model computed nonsense")

    def test_a_life_between_two_updates_is_told_of(self, make_timed, make_add):
        core, clock = make_timed(step_s=0.01)
        call(core, "subscribe")
        assert core.step().feed.is_snapshot
        core.add(make_add("a", max_tokens=2, ignore_eos=True))
        assert updates(core, 3) == []
        clock.advance(0.1)
        (fields,) = core.insight.take_update().requests
        assert (fields["id"], fields["state"], fields["output_tokens"]) == ("a", "finished", 2)

    def test_speed_follows_the_last_seconds_and_not_the_whole_life(self, make_timed, make_add):
        core, _ = make_timed(step_s=0.1, max_model_len=128, num_blocks=65)
        core.add(make_add("a", max_tokens=90, ignore_eos=True))
        for _ in range(20):
            core.step()
        assert core.insight.records()[0].tokens_per_s == 10.0
        core._executor.step_s = 0.5
        for _ in range(6):
            core.step()
        record = core.insight.records()[0]
        assert record.tokens_per_s < 3
        assert record.eta_s == pytest.approx((90 - 26) / record.tokens_per_s, rel=0.05)


class TestPace:
    def test_never_more_than_ten_a_second(self, make_timed, make_add):
        core, clock = make_timed(step_s=0.001, max_model_len=1024, num_blocks=300)
        call(core, "subscribe")
        core.add(make_add("a", max_tokens=1000, ignore_eos=True))
        told = updates(core, 1000)
        assert clock.now == pytest.approx(1001.0)
        assert 9 <= len(told) <= 11
        assert all(b.at - a.at >= MIN_INTERVAL_S - 1e-9 for a, b in pairwise(told))
        assert all(len(update.steps) == 1 for update in told)

    def test_nothing_is_told_or_kept_unless_somebody_listens(self, make_timed, make_add):
        core, _ = make_timed()
        core.add(make_add("a", max_tokens=3, ignore_eos=True))
        assert updates(core, 4) == []
        assert core.insight.due_in_s is None
        assert not core._scheduler.ledger.has_ended
        call(core, "subscribe")
        call(core, "unsubscribe")
        assert core.insight.take_update().is_snapshot  # the last one
        core.add(make_add("b", max_tokens=3, ignore_eos=True))
        assert updates(core, 4) == []
        assert not core._scheduler.ledger.has_ended

    def test_a_look_that_takes_long_is_followed_by_a_longer_wait(self, make_timed, make_add, monkeypatch):
        core, clock = make_timed(step_s=0.01, max_model_len=512, num_blocks=200)
        call(core, "subscribe")
        core.add(make_add("a", max_tokens=400, ignore_eos=True))
        held = core.insight._kv.num_blocks_held
        monkeypatch.setattr(core.insight._kv, "num_blocks_held", lambda name: clock.advance(0.002) or held(name))
        told = updates(core, 200)
        assert told[-1].interval_s == pytest.approx(0.5)
        assert all(b.at - a.at > 0.499 for a, b in pairwise(told))
        monkeypatch.setattr(core.insight._kv, "num_blocks_held", lambda name: clock.advance(9) or held(name))
        clock.advance(1)
        assert core.insight.take_update().interval_s == MAX_INTERVAL_S

    def test_an_idle_engine_knows_when_there_is_something_to_tell(self, make_timed, make_add):
        core, clock = make_timed(step_s=0.01)
        call(core, "subscribe")
        assert core.insight.due_in_s == 0
        core.step()
        assert core.insight.due_in_s is None
        core.add(make_add("a", max_tokens=2, ignore_eos=True))
        updates(core, 3)
        assert not core.has_work
        assert core.insight.due_in_s == pytest.approx(0.1 - 3 * 0.01)
        clock.advance(0.1)
        assert core.insight.take_update() is not None
        assert core.insight.due_in_s is None


class TestSteps:
    def test_the_record_of_a_step(self, make_timed, make_add):
        core, _ = make_timed(budget=16, num_blocks=17)
        call(core, "subscribe")
        core.add(make_add("a", range(10, 18), max_tokens=9, ignore_eos=True))
        core.step()
        core.add(make_add("b", range(20, 50), max_tokens=9, ignore_eos=True))
        core.add(make_add("c", range(50, 60), max_tokens=9, ignore_eos=True))
        (step,) = core.step().feed.steps
        assert (step.step, step.at, step.duration_ms, step.budget) == (2, 1000.25, 125.0, 16)
        assert step.tokens == StepTokens(prefill=15, decode=1, spec=0)
        assert step.requests == [StepShare("a", 1), StepShare("b", 15)]
        assert (step.running, step.waiting, step.preempted, step.graph_mode) == (2, 1, [], "")
        assert (step.kv_used, step.kv_cached, step.evictions) == (round(7 / 16, 4), 0.0, 0)

    def test_evictions_and_what_is_cached(self, make_timed, make_add):
        core, _ = make_timed(num_blocks=9, max_model_len=32)
        call(core, "subscribe")
        for index, name in enumerate("abc"):
            core.add(make_add(name, range(20 * index, 20 * index + 20), max_tokens=2, ignore_eos=True))
            told = updates(core, 3)
        stats = core.stats()
        assert stats.evictions == 3 + 5  # of six blocks that each newcomer took, three and one had no content
        assert stats.blocks_cached == sum(run.count for run in blocks(core) if run.owner is BlockOwner.CACHED)
        assert sum(step.evictions for update in told for step in update.steps) == 5

    def test_steps_are_counted_by_their_size(self, make_timed, make_add):
        core, _ = make_timed(budget=20)
        core.add(make_add("a", range(10, 40), max_tokens=3, ignore_eos=True))
        while core.has_work:
            core.step()
        stats = core.stats()
        by_bound = dict(zip(STEP_TOKENS_BUCKETS, stats.step_tokens, strict=False))
        assert {bound: count for bound, count in by_bound.items() if count} == {1: 2, 16: 1, 32: 1}
        assert stats.step_tokens_sum == 32

    def test_corrupted_requests_are_counted(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", max_tokens=3))
        broken = ModelRunnerOutput({}, errors={"a": "NaN"}, num_corrupted=1)
        scheduler.update_from_output(scheduler.schedule(), broken)
        assert scheduler.stats().corrupted == 1

    def test_drafts_are_counted_and_told_of(self, make_timed, make_add):
        core, clock = make_timed()
        call(core, "subscribe")
        core.add(make_add("a", max_tokens=9, ignore_eos=True))
        core.step()
        request = core._scheduler.requests["a"]
        core._scheduler.ledger.checked(request, 4, 3)
        (update,) = updates(core, 1)
        assert (update.requests[0]["spec_drafted"], update.requests[0]["spec_accepted"]) == (4, 3)
        assert (update.stats.drafted, update.stats.accepted) == ([1, 1, 1, 1], [1, 1, 1, 0])
        output = SchedulerOutput(
            step=9,
            new=[],
            known=KnownRequests(["a"], [None], [5]),
            num_scheduled_tokens={"a": 4},
            total_num_scheduled_tokens=4,
            shared_prefixes=[],
            finished_ids=[],
            preempted_ids=[],
            drafts={"a": [1, 2, 3]},
        )
        core.insight.landed(Landed(output, ModelRunnerOutput({}, graph=GraphUse("decode", 8)), clock.now, 0.02))
        clock.advance(1)
        (step,) = core.insight.take_update().steps
        assert (step.tokens, step.graph_mode, step.graph_size) == (StepTokens(0, 1, 3), "decode", 8)


def blocks(core):
    return core.insight.block_map().runs


class TestBlockMap:
    def test_owners_of_all_kinds(self, make_timed, make_add):
        core, clock = make_timed(num_blocks=17)
        core.add(make_add("gone", range(10, 19), max_tokens=1))
        while core.has_work:
            core.step()
        clock.advance(7.5)
        core.add(make_add("a", range(10, 16), max_tokens=9, ignore_eos=True))
        core.add(make_add("b", range(10, 16), max_tokens=9, ignore_eos=True))
        core.step()
        found = Counter()
        for run in blocks(core):
            found[run.owner.value, run.request_id, run.users, run.age_s] += run.count
        assert found == {
            ("null", None, 0, None): 1,
            ("used", "a", 2, None): 1,
            ("used", "a", 1, None): 1,
            ("used", "b", 1, None): 1,
            ("cached", None, 0, 7): 1,
            ("free", None, 0, None): 12,
        }

    def test_it_crosses_a_call(self, make_timed, make_add):
        core, _ = make_timed()
        core.add(make_add("a"))
        core.step()
        answer = call(core, "block_map")
        assert sum(run[1] for run in answer["runs"]) == answer["num_blocks"] == 33


class TestDivergence:
    """Prompts of 4 to 20 tokens against what others have left in the cache."""

    @pytest.mark.parametrize(
        ("first", "second", "at", "who"),
        [
            (range(10, 30), [*range(10, 21), 5, *range(22, 30)], 11, "first"),  # within a block
            (range(10, 30), [*range(10, 18), 5, *range(19, 30)], 8, "first"),  # at a block's beginning
            (range(10, 30), [10, 11, *range(50, 60)], 2, "first"),  # within the very first block
            (range(10, 30), range(50, 60), None, None),  # nothing in common
            (range(10, 30), range(10, 24), None, None),  # it goes no further than what was cached
            (range(10, 30), range(10, 30), None, None),  # the same
            (range(10, 20), range(10, 30), 8, "first"),  # it goes beyond the last full block
        ],
    )
    def test_where_a_prompt_leaves_what_is_cached(self, make_timed, make_add, first, second, at, who):
        core, _ = make_timed(num_blocks=65)
        core.add(make_add("first", list(first), max_tokens=1))
        while core.has_work:
            core.step()
        core.add(make_add("second", list(second), max_tokens=9, ignore_eos=True))
        core.step()
        (record,) = core.insight.records()
        assert (record.diverged_at, record.diverged_from) == (at, who)

    def test_the_nearest_of_several_is_named(self, make_timed, make_add):
        core, _ = make_timed(num_blocks=65)
        for name, third in (("x", 40), ("y", 41), ("z", 42)):
            core.add(make_add(name, [*range(10, 18), 20, third, *range(50, 56)], max_tokens=1))
            while core.has_work:
                core.step()
        core.add(make_add("second", [*range(10, 18), 20, 41, 5, 6, 7], max_tokens=9, ignore_eos=True))
        core.step()
        (record,) = core.insight.records()
        assert (record.cached_tokens, record.diverged_at, record.diverged_from) == (8, 10, "y")

    @pytest.mark.parametrize(("salt", "at"), [("s", 11), ("t", None), (None, None)])
    def test_only_under_the_same_salt(self, make_timed, make_add, salt, at):
        core, _ = make_timed(num_blocks=65)
        core.add(make_add("first", range(10, 30), max_tokens=1, cache_salt="s"))
        while core.has_work:
            core.step()
        prompt = [*range(10, 21), 5, *range(22, 30)]
        core.add(make_add("second", prompt, max_tokens=9, cache_salt=salt, ignore_eos=True))
        core.step()
        (record,) = core.insight.records()
        assert (record.diverged_at, record.salted) == (at, salt is not None)

    def test_what_was_evicted_is_forgotten(self, make_timed, make_add):
        core, _ = make_timed(num_blocks=9, max_model_len=32)
        core.add(make_add("first", range(10, 30), max_tokens=1))
        while core.has_work:
            core.step()
        core.add(make_add("other", range(40, 69), max_tokens=1))
        while core.has_work:
            core.step()
        core.add(make_add("second", [*range(10, 21), 5, 6], max_tokens=9, ignore_eos=True))
        core.step()
        (record,) = core.insight.records()
        assert record.diverged_from is None
        continuations = core.insight._kv._continuations
        assert len(continuations._blocks) == core.insight._kv.num_cached_blocks

    def test_a_cache_that_was_reset_is_forgotten(self, make_timed, make_add):
        core, _ = make_timed()
        core.add(make_add("first", range(10, 30), max_tokens=1))
        while core.has_work:
            core.step()
        assert call(core, "reset_prefix_cache")
        core.add(make_add("second", [*range(10, 21), 5], max_tokens=9))
        core.step()
        assert core.insight.records()[0].diverged_at is None


class TestReaders:
    def test_a_slow_reader_keeps_the_last_state(self, make_timed, make_add):
        core, _ = make_timed(max_num_seqs=2)
        call(core, "subscribe")
        pending, fast, slow = None, FeedMirror(), FeedMirror()
        ends = Counter()
        for index in range(40):
            if index % 4 == 0:
                core.add(make_add(f"r{index}", [10 + index, 5], max_tokens=7, ignore_eos=True))
            update = core.step().feed
            fast.apply(update)
            if pending is None:
                pending = PendingFeed(update)
            else:
                pending.put(update)
            if index % 13 == 12:
                merged, pending = pending.merged(), None
                slow.apply(merged)
                ends.update(fields["id"] for fields in merged.requests if "finished_at" in fields)
                assert slow.records == fast.records == by_id(core)
        assert ends
        assert set(ends.values()) == {1}

    def test_one_that_comes_late_gets_all_there_is(self, make_timed, make_add):
        core, _ = make_timed()
        call(core, "subscribe")
        early, late = FeedMirror(), FeedMirror()
        assert early.snapshot() is None
        core.add(make_add("a", max_tokens=20, ignore_eos=True))
        for update in updates(core, 5):
            early.apply(update)
        late.apply(early.snapshot())
        for update in updates(core, 3):
            early.apply(update)
            late.apply(update)
        assert late.records == early.records == by_id(core)

    def test_one_that_never_reads_costs_no_more_memory(self, make_timed, monkeypatch):
        monkeypatch.setattr("inferd.engine.insight.mirror.MAX_ENDED", 5)
        core, _ = make_timed()
        call(core, "subscribe")
        update = core.step().feed
        pending = PendingFeed(update)
        for index in range(50):
            ended = {"id": str(index), "state": "finished", "finished_at": 1.0}
            pending.put(update.__class__(1.0, False, [ended]))
        names = [fields["id"] for fields in pending.merged().requests]
        assert len(names) <= 11
        assert names[-1] == "49"

    def test_subscribing_again_gives_another_snapshot(self, make_timed, make_add):
        core, _ = make_timed()
        call(core, "subscribe")
        core.add(make_add("a", max_tokens=20, ignore_eos=True))
        updates(core, 3)
        call(core, "subscribe")
        (update,) = updates(core, 1)
        assert update.is_snapshot
        assert update.requests[0]["prompt_tokens"] == 3


def by_id(core):
    return {record.id: record for record in core.insight.records()}


ACTIONS = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 12),  # max_tokens
        st.sampled_from(["interactive", "batch"]),
        st.sampled_from(["ann", "bob"]),
        st.integers(0, 2),  # priority
    ),
    st.tuples(st.sampled_from(["cancel", "pause_request", "resume_request", "raise"]), st.integers(0, 20)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["pause", "resume"])),
)


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=40),
    policy=st.sampled_from(["fair", "priority"]),
    num_blocks=st.sampled_from([12, 40]),
    budget=st.sampled_from([3, 16]),
    is_async=st.booleans(),
    step_s=st.sampled_from([0.02, 0.1, 0.7]),
)
def test_deltas_add_up_to_the_records(make_core, make_add, actions, policy, num_blocks, budget, is_async, step_s):
    """Whatever happens: what was told, applied one after the other, is what the engine says when it is asked. And the
    map of its blocks agrees with who holds how many.
    """
    clock = FakeClock()
    executor = TimedExecutor(clock, step_s)
    options = dict(policy=policy, num_blocks=num_blocks, budget=budget, async_scheduling=is_async, max_num_seqs=4)
    core = make_core(executor=executor, clock=clock, max_model_len=44, **options)
    call(core, "subscribe")
    mirror, names = FeedMirror(), []

    def look():
        update = core.insight.take_update()
        if update is not None:
            mirror.apply(update)

    def step():
        if core.has_work:
            update = core.step().feed
            if update is not None:
                mirror.apply(update)
                assert mirror.records == by_id(core)
        check_blocks(core)

    for action, *values in actions:
        if action == "add":
            num_tokens, max_tokens, lane, client, priority = values
            prompt = [10 + len(names) % 3, *range(20, 19 + num_tokens)]
            fields = dict(lane=lane, client=client, priority=priority, ignore_eos=True)
            names.append(f"r{len(names)}")
            core.add(make_add(names[-1], prompt, max_tokens=max_tokens, **fields))
        elif action == "step":
            for _ in range(values[0]):
                step()
        elif action in ("pause", "resume"):
            core.call(Call(1, action, ["keep"] if action == "pause" else []))
        elif names:
            name = names[values[0] % len(names)]
            call(core, *(("set_priority", name, -1) if action == "raise" else (action, name)))
    call(core, "resume")
    for name in names:
        call(core, "resume_request", name)
    for _ in range(2000):
        if not core.has_work:
            break
        step()
    assert not core.has_work
    clock.advance(3)
    look()
    assert mirror.records == by_id(core) == {}
    stats = core.stats()
    assert (stats.blocks_free, stats.paused, stats.waiting) == (stats.blocks_total, 0, 0)


def check_blocks(core):
    told = core.insight.block_map()
    assert sum(run.count for run in told.runs) == told.num_blocks == core.stats().blocks_total + 1
    counts = Counter()
    for run in told.runs:
        counts[run.owner] += run.count
    stats = core.stats()
    assert counts[BlockOwner.NULL] == 1
    assert counts[BlockOwner.FREE] + counts[BlockOwner.CACHED] == stats.blocks_free
    assert counts[BlockOwner.CACHED] == stats.blocks_cached
    users = sum(run.count * run.users for run in told.runs)
    assert users == sum(record.kv_blocks for record in core.insight.records())
