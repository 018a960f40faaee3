"""Who goes first, who gives way, and the reasons for waiting as values. Blocks hold 4 tokens, the pool has 16."""

from __future__ import annotations

import pytest

from inferd.engine.core.admission import PauseState, Refusal, WaitReason
from inferd.engine.core.output import ModelRunnerOutput
from inferd.engine.testing.fake_executor import FakeExecutor, scrambled


def step(scheduler, **tokens):
    output = scheduler.schedule()
    sampled = {name: [token] for name, token in tokens.items() if name in output.num_scheduled_tokens}
    return output, scheduler.update_from_output(output, ModelRunnerOutput(sampled))


def ids_of_new(output):
    return [new.request_id for new in output.new]


class TestPriority:
    @pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(6, 16), (17, 1)], ids=["blocks", "places"])
    def test_a_better_request_takes_the_place_of_a_running_one(
        self, make_scheduler, make_request, num_blocks, max_num_seqs
    ):
        scheduler = make_scheduler(policy="priority", num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        scheduler.add(make_request("low", range(10, 25), priority=5))
        step(scheduler, low=50)
        scheduler.add(make_request("high", range(30, 38), priority=1))
        output, _ = step(scheduler, low=51)
        assert output.preempted_ids == ["low"]
        assert output.num_scheduled_tokens == {}  # nobody is admitted in a step that preempts
        output, _ = step(scheduler, high=2)  # and it ends
        assert ids_of_new(output) == ["high"]
        output, _ = step(scheduler, low=51)
        assert ids_of_new(output) == ["low"]
        assert output.new[0].token_ids == [*range(10, 25), 50]

    def test_both_get_the_tokens_that_they_would_get_alone(self, make_core, make_add):
        next_token = scrambled(97)
        core = make_core(
            policy="priority", num_blocks=7, max_model_len=24, executor=FakeExecutor(next_token=next_token)
        )
        core.add(make_add("low", range(10, 20), priority=3, max_tokens=12, ignore_eos=True))
        core.step()
        core.add(make_add("high", range(30, 42), priority=0, max_tokens=9, ignore_eos=True))
        tokens, order = {"low": [], "high": []}, []
        while core.has_work:
            for output in core.step().outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    order.append((output.request_id, output.num_preemptions))
        assert order == [("high", 0), ("low", 1)]
        for name, prompt, count in (("low", range(10, 20), 11), ("high", range(30, 42), 9)):
            expected = list(prompt)
            for _ in range(count + (name == "low")):
                expected.append(next_token(expected))
            assert tokens[name] == expected[-len(tokens[name]) :]

    def test_equals_and_betters_keep_their_place(self, make_scheduler, make_request):
        scheduler = make_scheduler(policy="priority", max_num_seqs=2)
        for name, priority in (("a", 1), ("b", 0)):
            scheduler.add(make_request(name, [5], priority=priority))
        step(scheduler, a=50, b=50)
        scheduler.add(make_request("c", [5], priority=1))
        assert scheduler.schedule().preempted_ids == []

    def test_nobody_goes_when_that_would_not_be_enough(self, make_scheduler, make_request):
        scheduler = make_scheduler(policy="priority", num_blocks=9)
        scheduler.add(make_request("good", range(10, 25), priority=0))
        scheduler.add(make_request("low", [5], priority=9))
        step(scheduler, good=50, low=50)
        scheduler.add(make_request("long", range(30, 55), priority=1))  # 7 blocks; 4 are held by its better
        assert scheduler.schedule().preempted_ids == []
        assert scheduler.waiting.head_refusal == Refusal(WaitReason.KV_FULL, 7, 3)

    def test_running_requests_get_the_budget_in_order(self, make_scheduler, make_request):
        scheduler = make_scheduler(policy="priority", budget=4)
        for name, priority in (("a", 7), ("b", 3), ("c", 5)):
            scheduler.add(make_request(name, [ord(name)], priority=priority, max_tokens=30))
        step(scheduler, a=50, b=50, c=50)
        scheduler.add(make_request("d", range(10, 30), priority=4, max_tokens=30))
        assert scheduler.schedule().num_scheduled_tokens == {"b": 1, "c": 1, "a": 1, "d": 1}
        assert scheduler.schedule().num_scheduled_tokens == {"b": 1, "d": 3}

    def test_the_worst_running_request_makes_room(self, make_scheduler, make_request):
        scheduler = make_scheduler(policy="priority", num_blocks=5, max_model_len=16)
        scheduler.add(make_request("a", range(10, 18), priority=2, max_tokens=8))
        scheduler.add(make_request("b", range(20, 28), priority=1, max_tokens=8))
        step(scheduler, a=50, b=60)
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"b": 1}
        assert output.preempted_ids == ["a"]


class TestFair:
    def test_a_flood_of_one_client_does_not_hold_up_another(self, make_scheduler, make_request):
        scheduler = make_scheduler(max_num_seqs=2)
        for index in range(50):
            scheduler.add(make_request(f"flood{index}", [5, index], client="flood", max_tokens=2))
        step(scheduler, flood0=50, flood1=50)
        scheduler.add(make_request("guest", [7], client="guest"))
        step(scheduler, flood0=50, flood1=50)  # they end
        assert ids_of_new(scheduler.schedule())[0] == "guest"

    def test_an_interactive_request_takes_the_place_of_a_batch_one(self, make_scheduler, make_request):
        scheduler = make_scheduler(max_num_seqs=2)
        for name in ("b1", "b2", "b3"):
            scheduler.add(make_request(name, [5, ord(name[1])], lane="batch", max_tokens=30))
        step(scheduler, b1=50, b2=50)
        scheduler.add(make_request("now", [7], max_tokens=30))
        assert scheduler.schedule().preempted_ids == ["b2"]
        assert ids_of_new(scheduler.schedule()) == ["now"]

    def test_a_place_that_was_made_is_not_given_to_the_other_lane(self, make_scheduler, make_request):
        """Even when the batch lane is the one that was served less by the time of the next step."""
        scheduler = make_scheduler(max_num_seqs=2, budget=200, max_model_len=120, num_blocks=60)
        scheduler.add(make_request("chat", range(10, 14), max_tokens=100))
        scheduler.add(make_request("batch", [5], lane="batch", max_tokens=100))
        step(scheduler, chat=50, batch=50)
        scheduler.add(make_request("now", [7], client="other", max_tokens=30))
        assert scheduler.schedule().preempted_ids == ["batch"]
        scheduler._queue._lanes["interactive"].served += 1000
        assert scheduler._queue.peek().request_id == "batch"
        assert ids_of_new(scheduler.schedule()) == ["now"]

    def test_batch_requests_get_their_share_of_a_busy_engine(self, make_core, make_add):
        core = make_core(max_num_seqs=2, num_blocks=65, max_model_len=64)
        for index in range(12):
            core.add(make_add(f"b{index}", [index, 5], lane="batch", max_tokens=20, ignore_eos=True))
        done, added = [], 0
        for _ in range(1500):
            while core.stats().waiting + core.stats().running - (12 - sum(n[0] == "b" for n in done)) < 4:
                core.add(make_add(f"i{added}", [added % 90, 6], max_tokens=20, ignore_eos=True))
                added += 1
            done += [output.request_id for output in core.step().outputs if output.finish_reason is not None]
            if "b3" in done:
                break
        before = sum(name[0] == "i" for name in done)
        assert 8 <= before <= 45  # four of them for eight each of the other lane, give or take what runs


class TestLongPrompts:
    def test_a_threshold_leaves_room_for_others(self, make_scheduler, make_request):
        scheduler = make_scheduler(budget=20, long_prefill_token_threshold=8)
        scheduler.add(make_request("long", range(10, 40)))
        scheduler.add(make_request("short", [5, 6]))
        first, _ = step(scheduler, short=50)
        assert first.num_scheduled_tokens == {"long": 8, "short": 2}
        assert scheduler.schedule().num_scheduled_tokens == {"long": 8, "short": 1}

    def test_blocks_that_a_cut_prompt_still_needs_are_not_given_away(self, make_scheduler, make_request):
        scheduler = make_scheduler(budget=20, long_prefill_token_threshold=8, num_blocks=10)
        scheduler.add(make_request("long", range(10, 40)))  # 8 of 9 blocks, and 2 of them now
        scheduler.add(make_request("other", range(50, 58)))
        output, _ = step(scheduler)
        assert output.num_scheduled_tokens == {"long": 8}
        assert scheduler.waiting.head_refusal == Refusal(WaitReason.KV_FULL, 2, 1)
        assert scheduler.schedule().num_scheduled_tokens == {"long": 8}


class Closed:
    """Does not let these in."""

    def __init__(self, *names):
        self.names = set(names)

    def refusal(self, request):
        return Refusal(WaitReason.PAUSED, 3) if request.request_id in self.names else None


class TestReasons:
    @pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
    def test_who_waits_for_something_of_his_own_is_passed_and_keeps_his_place(
        self, make_scheduler, make_request, policy
    ):
        gate = Closed("a", "c")
        scheduler = make_scheduler(policy=policy, gates=[gate], max_num_seqs=2)
        for name in "abcde":
            scheduler.add(make_request(name, [ord(name)], max_tokens=1))
        output, _ = step(scheduler, b=50, d=50)
        assert ids_of_new(output) == ["b", "d"]
        assert scheduler.waiting.own_refusals == dict.fromkeys("ac", Refusal(WaitReason.PAUSED, 3))
        assert [request.request_id for request in scheduler._queue] == ["a", "c", "e"]
        gate.names.clear()
        assert ids_of_new(scheduler.schedule()) == ["a", "c"]
        assert scheduler.waiting.own_refusals == {}

    def test_nobody_makes_way_for_a_request_that_waits_for_something_else(self, make_scheduler, make_request):
        scheduler = make_scheduler(policy="priority", gates=[Closed("high")], max_num_seqs=1)
        scheduler.add(make_request("low", [5], priority=5))
        step(scheduler, low=50)
        scheduler.add(make_request("high", [6], priority=1))
        assert scheduler.schedule().preempted_ids == []

    def test_places(self, make_scheduler, make_request):
        scheduler = make_scheduler(max_num_seqs=1)
        for name in "ab":
            scheduler.add(make_request(name, [5]))
        scheduler.schedule()
        assert scheduler.waiting.head_refusal == Refusal(WaitReason.SEQ_LIMIT, 2, 1)

    def test_budget(self, make_scheduler, make_request):
        scheduler = make_scheduler(budget=3)
        for name in "ab":
            scheduler.add(make_request(name, [5, 6, 7]))
        scheduler.schedule()
        assert scheduler.waiting.head_refusal == Refusal(WaitReason.TOKEN_BUDGET, 1, 0)

    def test_blocks(self, make_scheduler, make_request):
        scheduler = make_scheduler(num_blocks=9)
        scheduler.add(make_request("a", range(10, 30)))
        scheduler.add(make_request("b", range(40, 60)))
        scheduler.schedule()
        assert scheduler.waiting.head_refusal == Refusal(WaitReason.KV_FULL, 5, 3)

    def test_preemption(self, make_scheduler, make_request):
        scheduler = make_scheduler(num_blocks=5, max_model_len=16)
        a, b = make_request("a", range(10, 18), max_tokens=8), make_request("b", range(20, 28), max_tokens=8)
        for request in (a, b):
            scheduler.add(request)
        step(scheduler, a=50, b=60)
        scheduler.schedule()
        assert scheduler.waiting.head_refusal == Refusal(WaitReason.PREEMPTION)
        assert (b.preempted_for, a.preempted_for) == ("a", None)

    def test_nothing_to_say_when_nobody_waits(self, make_scheduler, make_request):
        scheduler = make_scheduler(max_num_seqs=1)
        scheduler.add(make_request("a", [5]))
        scheduler.schedule()
        assert scheduler.waiting.head_refusal is None

    def test_a_pause(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.waiting.pause_state = PauseState.NO_NEW
        scheduler.add(make_request("a", [5]))
        assert scheduler.schedule().is_empty
        assert scheduler.waiting.own_refusals == {"a": Refusal(WaitReason.PAUSED)}
