"""Every reason: the real scheduler is driven into it, the record names the thing and the numbers, then the cause goes
and the request runs. Blocks hold 4 tokens; a step takes a tenth of a second.
"""

from __future__ import annotations

import pytest

from inferd.engine.config import LoRAConfig
from inferd.engine.core.admission import Refusal, WaitReason
from inferd.engine.errors import EngineError
from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.insight.records import Reason
from inferd.engine.lora.registry import AdapterRegistry
from inferd.engine.messages import Call, FinishReason
from inferd.engine.testing.clock import FakeClock, TimedExecutor


class Engine:
    """An engine on a clock of its own, and what it says of its requests."""

    def __init__(self, make_core, make_add, **options):
        self.clock = FakeClock()
        executor = TimedExecutor(self.clock, next_token=lambda token_ids: 9)
        if "max_loras" in options:
            config = LoRAConfig(max_loras=options.pop("max_loras"), max_lora_rank=8, max_cpu_loras=4)
            options["lora"] = AdapterRegistry(config, executor)
        self.core = make_core(executor=executor, clock=self.clock, **options)
        self._make_add = make_add

    def add(self, name, num_tokens=4, **fields):
        """A prompt that begins like no other; it runs to its end of 8 tokens unless told otherwise."""
        fields = {"max_tokens": 8, "ignore_eos": True, **fields}
        prompt = [20 + len(self.core._scheduler.requests), *range(30, 29 + num_tokens)]
        self.core.add(self._make_add(name, prompt, **fields))

    def step(self, times=1):
        for _ in range(times):
            self.core.step()

    def call(self, method, *args):
        reply = self.core.call(Call(1, method, list(args)))
        assert reply is None or reply.error is None, reply
        return reply.result if reply is not None else None

    def record(self, name):
        return next(record for record in self.core.insight.records() if record.id == name)

    def why(self, name):
        record = self.record(name)
        return record.state, record.reason, record.reason_text, record.blocked_by

    def runs(self, name):
        """Whether it got tokens of the last step, and nothing keeps it."""
        record = self.record(name)
        return record.batch_size > 0 and record.reason is None and record.state in ("prefill", "decode")

    def run_until_gone(self, name):
        while name in self.core._scheduler.requests:
            self.core.step()


@pytest.fixture
def make_engine(make_core, make_add):
    return lambda **options: Engine(make_core, make_add, **options)


class TestQueue:
    def test_queue_order(self, make_engine):
        engine = make_engine(max_num_seqs=1)
        for name in "abcd":
            engine.add(name)
        engine.step()
        assert engine.why("c") == ("waiting", Reason.QUEUE_ORDER, "1 request ahead", None)
        assert engine.why("d") == ("waiting", Reason.QUEUE_ORDER, "2 requests ahead", None)
        assert [engine.record(name).position for name in "abcd"] == [None, 1, 2, 3]
        for name in "abc":
            engine.run_until_gone(name)
        engine.step()
        assert engine.runs("d")

    def test_one_that_has_just_come(self, make_engine):
        engine = make_engine()
        engine.add("a")
        assert engine.why("a") == ("waiting", Reason.QUEUE_ORDER, "the next step looks at it", None)
        engine.step()
        assert engine.runs("a")

    def test_a_better_priority_goes_first(self, make_engine):
        engine = make_engine(max_num_seqs=1, policy="priority")
        for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", 1)):
            engine.add(name, priority=priority)
        engine.step()
        assert engine.why("c") == (
            "waiting",
            Reason.QUEUE_ORDER,
            "2 requests ahead, 1 of a better priority",
            None,
        )
        engine.call("set_priority", "c", 0)
        assert engine.record("c").position == 1
        engine.run_until_gone("a")
        engine.step()
        assert engine.runs("c")

    def test_the_share_of_a_lane(self, make_engine):
        engine = make_engine(max_num_seqs=1)
        engine.add("i0")
        engine.step()
        engine.add("b0", lane="batch", num_tokens=24)
        engine.add("b1", lane="batch")
        for name in ("i1", "i2"):
            engine.add(name)
        engine.step()
        record = engine.record("b1")
        assert record.reason is Reason.LANE_SHARE
        ahead = record.position - 1
        assert record.reason_text == (
            f"lane batch has 1 of 9 parts: 2 later requests of another lane go first, {ahead} requests ahead"
        )
        for name in ("i1", "i2", "b0"):
            engine.call("cancel", name)
        engine.run_until_gone("i0")
        engine.step()
        assert engine.runs("b1")

    def test_the_share_of_a_client(self, make_engine):
        engine = make_engine(max_num_seqs=1)
        for name in ("f0", "f1", "f2"):
            engine.add(name, client="flood")
        engine.step()
        engine.add("g", client="guest")
        engine.step()
        assert engine.why("f2") == (
            "waiting",
            Reason.LANE_SHARE,
            "client flood has had its share: 1 later request of other clients goes first, 2 requests ahead",
            None,
        )
        for name in ("f0", "g", "f1"):
            engine.run_until_gone(name)
        engine.step()
        assert engine.runs("f2")


class TestResources:
    def test_kv_full_names_who_frees_enough(self, make_engine):
        engine = make_engine(num_blocks=17)
        engine.add("a", num_tokens=40, max_tokens=10)
        engine.step(5)  # 5 of its tokens are there, 11 blocks are its
        engine.add("b", num_tokens=30)
        engine.step()
        assert engine.why("b") == (
            "waiting",
            Reason.KV_FULL,
            "needs 8 blocks, 4 free; a is expected to free 12 in about 0.4 s",
            "a",
        )
        assert engine.record("b").eta_s == 0.4
        engine.run_until_gone("a")
        engine.step()
        assert engine.runs("b")

    def test_kv_full_with_an_end_that_may_come_sooner(self, make_engine):
        engine = make_engine(num_blocks=17)
        engine.add("a", num_tokens=40, max_tokens=20, ignore_eos=False)
        engine.step(3)
        engine.add("b", num_tokens=30)
        engine.step()
        assert engine.record("b").reason_text == "needs 8 blocks, 5 free; a is expected to free 11 within 1.6 s"

    def test_kv_full_until_several_have_ended(self, make_engine):
        engine = make_engine(num_blocks=17)
        engine.add("a", num_tokens=20, max_tokens=10)
        engine.add("b", num_tokens=20, max_tokens=12)
        engine.step(3)
        engine.add("c", num_tokens=50)
        engine.step()
        assert engine.why("c") == (
            "waiting",
            Reason.KV_FULL,
            "needs 13 blocks, 4 free; b and 1 other are expected to free 12 in about 0.8 s",
            "b",
        )
        engine.run_until_gone("b")
        engine.step()
        assert engine.runs("c")

    def test_kv_full_when_nobodys_end_is_known(self, make_engine):
        engine = make_engine(num_blocks=17, budget=16)
        engine.add("a", num_tokens=40)
        engine.add("b", num_tokens=30)
        engine.step(3)
        assert engine.record("a").output_tokens == 1  # no speed is known of one token
        assert engine.why("b") == ("waiting", Reason.KV_FULL, "needs 8 blocks, 6 free", None)

    def test_kv_full_in_a_step_that_takes_blocks_from_others(self, make_engine):
        engine = make_engine(num_blocks=17, policy="priority")
        engine.add("low", num_tokens=40, priority=5, max_tokens=20)
        engine.step(2)
        engine.add("high", num_tokens=30, priority=1)
        engine.step()
        assert engine.why("high") == (
            "waiting",
            Reason.KV_FULL,
            "low gave up its blocks in the last step; the next one looks again",
            "low",
        )
        engine.step()
        assert engine.runs("high")

    def test_seq_limit(self, make_engine):
        engine = make_engine(max_num_seqs=2)
        for name, max_tokens in (("a", 12), ("b", 8), ("c", 8)):
            engine.add(name, max_tokens=max_tokens)
        engine.step(3)
        assert engine.why("c") == (
            "waiting",
            Reason.SEQ_LIMIT,
            "2 of 2 sequences run; b is expected to end in about 0.5 s",
            "b",
        )
        engine.run_until_gone("b")
        engine.step()
        assert engine.runs("c")

    def test_token_budget_of_a_newcomer(self, make_engine):
        engine = make_engine(budget=8)
        engine.add("a", num_tokens=30)
        engine.add("b")
        engine.step()
        assert engine.why("b") == (
            "waiting",
            Reason.TOKEN_BUDGET,
            "the last step's 8 tokens were taken by 1 request",
            None,
        )
        engine.step(3)
        assert engine.runs("b")

    def test_token_budget_of_a_running_request(self, make_engine):
        engine = make_engine(budget=4, policy="priority")
        engine.add("low", priority=5, max_tokens=30)
        engine.step(2)
        engine.add("high", num_tokens=40, priority=1)
        engine.step(3)
        assert engine.why("low") == (
            "decode",
            Reason.TOKEN_BUDGET,
            "the last step's 4 tokens were taken by 1 request",
            None,
        )
        assert engine.record("low").batch_size == 0
        engine.call("cancel", "high")
        engine.step()
        assert engine.runs("low")

    def test_token_budget_of_a_prompt_that_cannot_be_divided(self, make_engine):
        engine = make_engine(budget=16, enable_chunked_prefill=False)
        engine.add("a", num_tokens=10)
        engine.add("b", num_tokens=12)
        engine.step()
        assert engine.why("b") == (
            "waiting",
            Reason.TOKEN_BUDGET,
            "needs 12 tokens of one step, 6 were left of the last one",
            None,
        )
        engine.step()
        assert engine.runs("b")

    def test_preempted(self, make_engine):
        engine = make_engine(num_blocks=6, max_model_len=20)
        engine.add("a", num_tokens=8, max_tokens=10)
        engine.add("b", num_tokens=11, max_tokens=9)
        engine.step(4)
        record = engine.record("b")
        assert engine.why("b") == (
            "preempted",
            Reason.PREEMPTED,
            "gave its blocks to a; will compute up to 12 tokens again",
            "a",
        )
        assert (record.preemptions, record.kv_blocks, record.kv_blocks_peak, record.computed_tokens) == (1, 0, 3, 0)
        assert record.eta_s == 0.6  # when a has all of its tokens
        engine.run_until_gone("a")
        assert engine.record("b").reason_text == (
            "gave its blocks to a request that has ended since; will compute up to 12 tokens again"
        )
        engine.step()
        assert engine.runs("b")
        assert engine.record("b").kv_blocks == 3

    def test_preempted_for_want_of_a_block_of_its_own(self, make_engine):
        engine = make_engine(num_blocks=6, max_model_len=20)
        for name in "ab":
            engine.add(name, num_tokens=8, max_tokens=10)
        engine.step(2)
        assert engine.why("b") == (
            "preempted",
            Reason.PREEMPTED,
            "found no free block and gave back its own; will compute up to 9 tokens again",
            None,
        )
        engine.run_until_gone("a")
        engine.step()
        assert engine.runs("b")

    def test_adapter_slots(self, make_engine):
        engine = make_engine(max_loras=1)
        for adapter in ("french", "german"):
            engine.call("add_lora", adapter, f"/adapters/{adapter}")
        engine.add("a", lora="french")
        engine.add("b", lora="german")
        engine.add("c", lora="french")
        engine.step()
        assert engine.why("b") == (
            "waiting",
            Reason.ADAPTER_SLOTS,
            "adapter german waits for a place: 1 of 1 run",
            None,
        )
        assert engine.record("b").adapter == "german"
        for name in "ac":
            engine.call("cancel", name)
        engine.step()
        assert engine.runs("b")


class Compiling:
    """Grammars that are ready when the test says so."""

    is_ready = False

    def check(self, params):
        pass

    def add(self, request):
        pass

    def remove(self, request_id):
        pass

    def refusal(self, request):
        is_free = self.is_ready or request.structured_output is None
        return None if is_free else Refusal(WaitReason.GRAMMAR_COMPILING)

    def take_failures(self):
        return {}

    def must_wait(self, output):
        return False

    def bitmask(self, output):
        return None

    def accept(self, request, token_id):
        return None

    def has_ended(self, request):
        return False

    def close(self):
        pass


def test_grammar_compiling(make_engine):
    grammar = Compiling()
    engine = make_engine(grammar=grammar)
    engine.add("a", structured_output=StructuredOutput(regex="a+"))
    engine.add("b")
    engine.step(4)
    assert engine.why("a") == (
        "waiting",
        Reason.GRAMMAR_COMPILING,
        "its regex is being compiled, for 0.4 s now",
        None,
    )
    assert engine.runs("b")
    assert engine.record("a").position is None
    engine.add("c", max_tokens=1)
    assert engine.record("c").position == 1
    grammar.is_ready = True
    engine.step()
    assert engine.runs("a")


class TestPauses:
    def test_a_running_request_gives_up_its_blocks_until_it_is_resumed(self, make_engine):
        engine = make_engine()
        engine.add("a", num_tokens=10, max_tokens=12)
        engine.add("b", max_tokens=12)
        engine.step(3)
        assert engine.call("pause_request", "a", "ann") is True
        engine.step(40)
        assert engine.why("a") == ("paused", Reason.PAUSED_BY, "paused by ann 1 s ago", None)
        engine.clock.advance(150)
        assert engine.record("a").reason_text == "paused by ann 2 min ago"
        assert (engine.record("a").kv_blocks, engine.record("a").output_tokens) == (0, 3)
        assert not engine.core.has_work  # an engine with paused requests alone has nothing to do
        assert engine.core.stats().blocks_free == engine.core.stats().blocks_total
        assert engine.call("resume_request", "a") is True
        engine.step()
        assert engine.runs("a")
        outputs = [output for _ in range(12) for output in engine.core.step().outputs]
        assert outputs[-1].finish_reason is FinishReason.LENGTH

    def test_a_waiting_request_is_passed_by_and_comes_back_to_its_place(self, make_engine):
        engine = make_engine(max_num_seqs=1, policy="fcfs")
        for name in "abc":
            engine.add(name)
        engine.step()
        engine.call("pause_request", "b", "ann")
        assert (engine.record("b").position, engine.record("c").position) == (None, 1)
        assert engine.why("b") == ("paused", Reason.PAUSED_BY, "paused by ann 0 s ago", None)
        engine.call("resume_request", "b")
        assert (engine.record("b").position, engine.record("c").position) == (1, 2)
        engine.run_until_gone("a")
        engine.step()
        assert engine.runs("b")

    def test_the_engine_as_a_whole(self, make_engine):
        engine = make_engine()
        engine.add("a", max_tokens=20)
        engine.step(2)
        engine.call("pause", "keep", False, "bob")
        engine.add("b")
        engine.step()
        engine.clock.advance(5)
        for name in "ab":
            assert engine.why(name) == ("paused", Reason.PAUSED_BY, "the engine was paused by bob 5 s ago", None)
        engine.call("resume")
        engine.step()
        assert engine.runs("a")
        assert engine.runs("b")

    def test_newcomers_alone(self, make_engine):
        engine = make_engine()
        engine.add("a", max_tokens=20)
        engine.step(2)
        engine.call("pause", "wait", False, "bob")
        engine.add("b")
        engine.step(3)
        assert engine.runs("a")
        assert engine.why("b")[1:3] == (Reason.PAUSED_BY, "the engine was paused by bob 0 s ago")
        engine.call("resume")
        engine.step()
        assert engine.runs("b")

    def test_an_engine_that_sleeps(self, make_engine):
        engine = make_engine()
        assert engine.call("sleep", 1) is not None
        engine.add("a")
        assert not engine.core.has_work
        assert engine.why("a") == (
            "waiting",
            Reason.MODEL_WAKING,
            "the engine is sleeping_1; it runs again when it is awake",
            None,
        )
        engine.call("wake")
        engine.step()
        assert engine.runs("a")


class TestActions:
    def test_a_cancelled_request_ends_for_its_stream(self, make_engine):
        engine = make_engine()
        engine.add("a")
        engine.step(2)
        assert engine.call("cancel", "a") is True
        (output,) = engine.core.step().outputs
        assert (output.request_id, output.finish_reason) == ("a", FinishReason.ABORT)
        assert engine.call("cancel", "a") is False

    def test_a_paused_request_can_be_cancelled(self, make_engine):
        engine = make_engine()
        engine.add("a")
        engine.step(2)
        engine.call("pause_request", "a")
        engine.call("cancel", "a")
        assert [output.finish_reason for output in engine.core.step().outputs] == [FinishReason.ABORT]
        assert engine.core.insight.records() == []

    @pytest.mark.parametrize("method", ["pause_request", "resume_request"])
    def test_nobody_of_that_name(self, make_engine, method):
        assert make_engine().call(method, "nobody") is False

    def test_a_running_request_changes_its_place_among_the_running(self, make_engine):
        engine = make_engine(policy="priority", num_blocks=33)
        for name in "ab":
            engine.add(name, priority=1, max_tokens=30)
        engine.step(2)
        assert engine.call("set_priority", "b", 0) is True
        assert list(engine.core._scheduler.schedule().num_scheduled_tokens) == ["b", "a"]
        assert engine.record("b").priority == 0

    def test_priorities_that_cannot_be(self, make_engine):
        engine = make_engine(policy="fcfs")
        reply = engine.core.call(Call(1, "set_priority", ["a", 1]))
        assert "scheduling_policy=fcfs has no priorities" in reply.error
        reply = make_engine().core.call(Call(1, "set_priority", ["a", "high"]))
        assert "a priority is a whole number" in reply.error

    def test_batch_mates(self, make_engine):
        engine = make_engine()
        for name in "abc":
            engine.add(name)
        engine.step()
        engine.add("late")
        assert engine.call("batch_mates", "a") == ["b", "c"]
        assert engine.call("batch_mates", "late") == []
        with pytest.raises(EngineError, match="no unfinished request 'nobody'"):
            engine.core.insight.batch_mates("nobody")
