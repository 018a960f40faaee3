"""The scheduler's rules, one by one. Blocks hold 4 tokens; the default pool has 16 of them."""

from __future__ import annotations

import msgspec
import pytest

from inferd.engine.core.output import ModelRunnerOutput
from inferd.engine.errors import InvalidRequest
from inferd.engine.messages import FinishReason


def sample(scheduler, output, **tokens):
    """Feed the given tokens; a bare number is a list of one."""
    sampled = {name: value if isinstance(value, list) else [value] for name, value in tokens.items()}
    return scheduler.update_from_output(output, ModelRunnerOutput(sampled))


def step(scheduler, **tokens):
    output = scheduler.schedule()
    return output, sample(scheduler, output, **tokens)


def ids_of_new(output):
    return [new.request_id for new in output.new]


class TestBudget:
    def test_a_new_request_travels_in_full_and_then_as_differences(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [5, 6, 7, 8], max_tokens=9))
        first, _ = step(scheduler, a=50)
        assert first.num_scheduled_tokens == {"a": 4}
        assert first.total_num_scheduled_tokens == 4
        new = first.new[0]
        assert (new.token_ids, new.num_prompt_tokens, new.num_computed_tokens) == ([5, 6, 7, 8], 4, 0)
        assert new.block_ids == ([1],)
        second, _ = step(scheduler, a=51)
        assert second.new == []
        assert second.known.request_ids == ["a"]
        assert second.known.num_computed_tokens == [4]
        assert second.known.new_block_ids == [([2],)]
        third, _ = step(scheduler, a=52)
        assert third.known.new_block_ids == [None]
        assert [first.step, second.step, third.step] == [1, 2, 3]

    def test_a_long_prompt_takes_several_steps(self, make_scheduler, make_request):
        scheduler = make_scheduler(budget=4)
        scheduler.add(make_request("a", range(10, 20)))
        chunks = [step(scheduler)[0].num_scheduled_tokens["a"] for _ in range(3)]
        assert chunks == [4, 4, 2]

    def test_one_step_mixes_running_and_starting_requests(self, make_scheduler, make_request):
        scheduler = make_scheduler(budget=6)
        scheduler.add(make_request("a", [5, 6, 7]))
        step(scheduler, a=50)
        scheduler.add(make_request("b", range(10, 20)))
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 1, "b": 5}
        assert ids_of_new(output) == ["b"]

    def test_running_requests_come_before_waiting_ones(self, make_scheduler, make_request):
        scheduler = make_scheduler(budget=2)
        for name in "ab":
            scheduler.add(make_request(name, [ord(name)]))
        step(scheduler, a=50, b=51)
        scheduler.add(make_request("c", [1]))
        assert scheduler.schedule().num_scheduled_tokens == {"a": 1, "b": 1}

    def test_a_running_request_with_nothing_to_do_is_skipped(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        for name in "ab":
            scheduler.add(make_request(name, [ord(name)] * 3, max_tokens=1 if name == "a" else 5))
        scheduler.schedule()  # the last token of "a" is on its way
        scheduler.add(make_request("c", [1]))
        assert scheduler.schedule().num_scheduled_tokens == {"b": 1, "c": 1}

    def test_placeholders_count_as_tokens(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        request = make_request("a", [5, 6, 7], max_tokens=3)
        scheduler.add(request)
        scheduler.schedule()
        request.num_output_placeholders = 1
        assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
        request.num_output_placeholders = 2
        assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
        request.num_output_placeholders = 3  # the third token is the last: nobody asks what follows it
        assert scheduler.schedule().num_scheduled_tokens == {}

    def test_computed_tokens_advance_when_they_are_scheduled(self, make_scheduler, make_request):
        scheduler = make_scheduler(budget=2)
        request = make_request("a", [5, 6, 7])
        scheduler.add(request)
        scheduler.schedule()
        assert request.num_computed_tokens == 2

    def test_at_most_max_num_seqs_run(self, make_scheduler, make_request):
        scheduler = make_scheduler(max_num_seqs=2)
        for name in "abc":
            scheduler.add(make_request(name, [ord(name)], max_tokens=1 if name == "a" else 5))
        first, _ = step(scheduler, a=50, b=50)
        assert ids_of_new(first) == ["a", "b"]
        assert ids_of_new(scheduler.schedule()) == ["c"]


class TestAdmission:
    def test_a_request_that_does_not_fit_holds_up_those_behind_it(self, make_scheduler, make_request):
        scheduler = make_scheduler(num_blocks=9)
        scheduler.add(make_request("a", range(10, 30)))
        scheduler.schedule()
        scheduler.add(make_request("big", range(40, 60)))
        scheduler.add(make_request("small", [1]))
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 1}
        assert scheduler.stats().waiting == 2

    def test_a_prompt_is_admitted_only_when_all_of_it_fits(self, make_scheduler, make_request):
        scheduler = make_scheduler(num_blocks=9, budget=4)
        scheduler.add(make_request("a", range(10, 14)))
        scheduler.add(make_request("big", range(40, 72)))  # 8 blocks, of which 7 are free
        step(scheduler, a=50)
        assert scheduler.schedule().num_scheduled_tokens == {"a": 1}

    def test_a_hit_shortens_what_is_computed(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", range(10, 19), max_tokens=1))
        _, outputs = step(scheduler, a=50)
        assert outputs[0].num_cached_tokens == 0
        scheduler.add(make_request("b", range(10, 19), max_tokens=1))
        output, outputs = step(scheduler, b=50)
        assert output.new[0].num_computed_tokens == 8
        assert output.num_scheduled_tokens == {"b": 1}
        assert outputs[0].num_cached_tokens == 8
        stats = scheduler.stats()
        assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (18, 8)

    def test_equal_prompts_of_one_step_are_computed_once(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        for name in "ab":
            scheduler.add(make_request(name, range(10, 19)))
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 9, "b": 1}
        assert output.shared_prefixes == []
        sample(scheduler, output, a=50, b=50)
        shared = scheduler.schedule().shared_prefixes
        assert [(prefix.num_blocks, prefix.request_ids) for prefix in shared] == [(2, ["a", "b"])]

    def test_shared_prefixes_are_looked_for_only_when_asked(self, make_scheduler, make_request):
        scheduler = make_scheduler(share_prefix_attention=False)
        for name in "ab":
            scheduler.add(make_request(name, range(10, 19)))
        step(scheduler, a=50, b=50)
        assert scheduler.schedule().shared_prefixes == []

    def test_an_id_is_used_once_at_a_time(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a"))
        with pytest.raises(InvalidRequest, match="'a' is already in use"):
            scheduler.add(make_request("a"))


class TestPreemption:
    @pytest.fixture
    def full(self, make_scheduler, make_request):
        """Two requests of 8 tokens that fill a pool of 4 blocks, each about to need one more."""
        scheduler = make_scheduler(num_blocks=5, max_model_len=16)
        for name, prompt in (("a", range(10, 18)), ("b", range(20, 28))):
            scheduler.add(make_request(name, prompt, max_tokens=8))
        step(scheduler, a=50, b=60)
        return scheduler

    def test_the_newest_running_request_makes_room(self, full):
        output = full.schedule()
        assert output.num_scheduled_tokens == {"a": 1}
        assert output.preempted_ids == ["b"]
        assert output.known.new_block_ids == [([4],)]
        assert full.stats().preemptions == 1

    def test_nobody_is_admitted_in_a_step_that_preempted(self, full, make_request):
        full.add(make_request("c", [1]))
        output = full.schedule()
        assert output.preempted_ids == ["b"]
        assert output.new == []

    def test_it_comes_back_as_new_with_all_its_tokens(self, full, make_request):
        full.add(make_request("c", [1]))
        output = full.schedule()
        sample(full, output, a=2)  # "a" ends
        output, outputs = step(full, b=61)
        assert ids_of_new(output) == ["b", "c"]  # before those that came later
        resumed = output.new[0]
        assert resumed.token_ids == [*range(20, 28), 60]
        assert resumed.num_prompt_tokens == 8
        assert resumed.num_computed_tokens == 4  # the head of its own blocks is still cached
        assert output.num_scheduled_tokens["b"] == 5
        assert outputs[0].num_preemptions == 1

    def test_finding_its_own_blocks_again_is_no_cache_hit_of_the_client(self, full):
        sample(full, full.schedule(), a=2)
        _, outputs = step(full, b=61)
        assert outputs[0].num_cached_tokens == 0
        assert full.stats().prefix_hit_tokens == 0

    def test_a_request_may_have_to_preempt_itself(self, make_scheduler, make_request):
        scheduler = make_scheduler(num_blocks=5, max_model_len=16)
        scheduler.add(make_request("a", range(10, 17), max_tokens=9))
        scheduler.add(make_request("b", range(20, 28), max_tokens=8))
        step(scheduler, a=50, b=60)
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"a": 1}
        assert output.preempted_ids == ["b"]

    def test_several_victims_keep_their_order(self, make_scheduler, make_request):
        scheduler = make_scheduler(num_blocks=7, max_model_len=24)
        scheduler.add(make_request("a", range(10, 26), max_tokens=8))
        for name in "bc":
            scheduler.add(make_request(name, [ord(name)], max_tokens=20))
        output = scheduler.schedule()
        sample(scheduler, output, a=[50, 51, 52, 53, 54], b=60, c=70)  # "a" needs two more blocks at once
        output = scheduler.schedule()
        assert output.preempted_ids == ["c", "b"]
        sample(scheduler, output, a=2)
        assert ids_of_new(scheduler.schedule()) == ["b", "c"]


class TestStops:
    @pytest.mark.parametrize(
        ("params", "tokens", "kept", "reason", "stop_reason"),
        [
            ({}, [2], [2], FinishReason.STOP, None),
            ({"ignore_eos": True}, [2], [2], None, None),
            ({"stop_token_ids": [9]}, [9], [9], FinishReason.STOP, 9),
            ({"stop_token_ids": [2], "ignore_eos": True}, [2], [2], FinishReason.STOP, 2),
            ({"min_tokens": 2, "stop_token_ids": [9]}, [9], [9], None, None),
            ({"min_tokens": 2}, [2], [2], None, None),
            ({"min_tokens": 2}, [7, 2], [7, 2], FinishReason.STOP, None),
            ({"max_tokens": 1}, [7], [7], FinishReason.LENGTH, None),
            ({"max_tokens": 1}, [2], [2], FinishReason.STOP, None),
            ({"max_tokens": 2}, [7, 8, 9], [7, 8], FinishReason.LENGTH, None),
            ({"stop_token_ids": [9]}, [7, 9, 8, 2], [7, 9], FinishReason.STOP, 9),
            ({}, [7, 8], [7, 8], None, None),
        ],
    )
    def test_a_request_ends_at_its_first_stop(
        self, make_scheduler, make_request, params, tokens, kept, reason, stop_reason
    ):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [5, 6, 7], **params))
        _, (output,) = step(scheduler, a=tokens)
        assert (output.new_token_ids, output.finish_reason, output.stop_reason) == (kept, reason, stop_reason)
        assert scheduler.has_unfinished == (reason is None)

    @pytest.mark.parametrize("min_tokens", [0, 40])
    def test_the_context_ends_a_request_whatever_it_asked_for(self, make_scheduler, make_request, min_tokens):
        scheduler = make_scheduler(max_model_len=5)
        scheduler.add(make_request("a", [5, 6, 7], max_tokens=50, min_tokens=min_tokens))
        step(scheduler, a=50)
        _, (output,) = step(scheduler, a=51)
        assert output.finish_reason is FinishReason.LENGTH

    def test_a_finished_request_gives_back_its_blocks(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", range(10, 19)))
        step(scheduler, a=2)
        stats = scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.blocks_free == stats.blocks_total == 16


class TestEnds:
    def test_workers_are_told_of_a_finish_once_even_when_nothing_else_runs(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a"))
        step(scheduler, a=2)
        assert scheduler.has_work
        assert not scheduler.has_unfinished
        output = scheduler.schedule()
        assert output.finished_ids == ["a"]
        assert not output.is_empty
        assert not scheduler.has_work
        assert scheduler.schedule().is_empty

    def test_a_late_result_of_an_aborted_request_is_dropped(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a"))
        output = scheduler.schedule()
        (last,) = scheduler.abort(["a"])
        assert (last.finish_reason, last.new_token_ids) == (FinishReason.ABORT, [])
        assert sample(scheduler, output, a=50) == []
        assert scheduler.schedule().finished_ids == ["a"]

    def test_abort_is_idempotent_and_forgives_unknown_ids(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a"))
        assert len(scheduler.abort(["a", "nobody", "a"])) == 1
        assert scheduler.abort(["a"]) == []

    def test_a_waiting_request_is_aborted_without_a_word_to_the_workers(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        for name in "abc":
            scheduler.add(make_request(name, [ord(name)]))
        scheduler.abort(["b"])
        output = scheduler.schedule()
        assert ids_of_new(output) == ["a", "c"]
        assert output.finished_ids == []

    def test_a_preempted_request_is_aborted_without_a_second_word(self, make_scheduler, make_request):
        scheduler = make_scheduler(num_blocks=5, max_model_len=16)
        for name, prompt in (("a", range(10, 18)), ("b", range(20, 28))):
            scheduler.add(make_request(name, prompt))
        step(scheduler, a=50, b=60)
        assert scheduler.schedule().preempted_ids == ["b"]
        assert scheduler.abort(["b"])[0].num_preemptions == 1
        assert scheduler.schedule().finished_ids == []
        scheduler.abort(["a"])
        assert scheduler.stats().blocks_free == 4

    def test_a_request_that_the_workers_give_up_on_fails_alone(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        for name in ("lost", "fine"):
            scheduler.add(make_request(name, range(10, 19), max_tokens=5))
        output = scheduler.schedule()
        failed, good = scheduler.update_from_output(output, ModelRunnerOutput({"fine": [50]}, {"lost": "no logits"}))
        assert (failed.request_id, failed.finish_reason, failed.error) == ("lost", FinishReason.ERROR, "no logits")
        assert (good.new_token_ids, good.finish_reason, good.error) == ([50], None, None)
        after = scheduler.schedule()
        assert after.finished_ids == ["lost"]
        assert list(after.num_scheduled_tokens) == ["fine"]
        scheduler.abort(["fine"])
        assert scheduler.stats().blocks_free == scheduler.stats().blocks_total

    def test_what_a_failed_request_left_in_the_cache_is_not_found(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        for name, tokens, errors in (
            ("fine", {"fine": [2]}, {}),
            ("lost", {}, {"lost": "no logits"}),
            ("next", {}, {}),
        ):
            scheduler.add(make_request(name, range(10, 19), max_tokens=5))
            output = scheduler.schedule()
            assert output.new[0].num_computed_tokens == (8 if name == "lost" else 0)
            scheduler.update_from_output(output, ModelRunnerOutput(tokens, errors))

    def test_a_failure_of_an_aborted_request_is_dropped(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a"))
        output = scheduler.schedule()
        scheduler.abort(["a"])
        assert scheduler.update_from_output(output, ModelRunnerOutput({}, {"a": "no logits"})) == []

    def test_a_chunk_without_a_token_gives_no_output(self, make_scheduler, make_request):
        scheduler = make_scheduler(budget=2)
        scheduler.add(make_request("a", [5, 6, 7]))
        assert step(scheduler)[1] == []
        assert step(scheduler, a=[])[1] == []

    def test_stats_count_from_the_start(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [5, 6, 7], max_tokens=2))
        step(scheduler, a=50)
        step(scheduler, a=[51, 52])
        stats = scheduler.stats()
        assert (stats.step, stats.prompt_tokens, stats.generated_tokens) == (2, 3, 2)


def test_an_output_never_changes_afterwards(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=9, max_model_len=16)
    for name in "abc":
        scheduler.add(make_request(name, [*range(10, 18), ord(name)], max_tokens=4))
    seen = []
    for token in range(50, 60):
        output = scheduler.schedule()
        seen.append((output, msgspec.msgpack.encode(output)))
        sample(scheduler, output, **dict.fromkeys(output.num_scheduled_tokens, token))
    assert not scheduler.has_work
    assert all(msgspec.msgpack.encode(output) == then for output, then in seen)
