"""Steps that overlap: the scheduler ahead of its results, the core with two steps on their way, and pauses."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from inferd.engine.core.admission import Refusal, WaitReason
from inferd.engine.core.output import ModelRunnerOutput
from inferd.engine.messages import Call, FinishReason
from inferd.engine.testing.fake_executor import FakeExecutor


def take_in(scheduler, output, **tokens):
    return scheduler.update_from_output(output, ModelRunnerOutput({name: [token] for name, token in tokens.items()}))


class TestAhead:
    """The scheduler alone, with results that come late."""

    def test_the_next_step_does_not_wait_for_tokens(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [5, 6, 7], max_tokens=4))
        first, second = scheduler.schedule(), scheduler.schedule()
        assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 3}, {"a": 1})
        assert second.known.num_computed_tokens == [3]
        assert take_in(scheduler, first, a=50)[0].new_token_ids == [50]
        assert take_in(scheduler, second, a=51)[0].new_token_ids == [51]

    def test_nothing_is_scheduled_past_max_tokens(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [5, 6, 7], max_tokens=2))
        assert [scheduler.schedule().num_scheduled_tokens for _ in range(3)] == [{"a": 3}, {"a": 1}, {}]

    def test_a_prompt_in_chunks_has_one_token_on_its_way(self, make_scheduler, make_request):
        scheduler = make_scheduler(budget=2)
        request = make_request("a", [5, 6, 7], max_tokens=4)
        scheduler.add(request)
        counts = []
        for _ in range(4):
            scheduler.schedule()
            counts.append((request.num_computed_tokens, request.num_output_placeholders))
        assert counts == [(2, 0), (3, 1), (4, 2), (5, 3)]

    def test_a_token_that_comes_after_the_end_is_dropped(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [5, 6, 7], max_tokens=9))
        first, second = scheduler.schedule(), scheduler.schedule()
        assert take_in(scheduler, first, a=2)[0].finish_reason is FinishReason.STOP
        assert take_in(scheduler, second, a=51) == []
        assert scheduler.schedule().finished_ids == ["a"]
        assert scheduler.stats().generated_tokens == 1

    def test_a_late_token_is_not_given_to_a_newcomer_of_the_same_name(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [5, 6, 7], max_tokens=9))
        first, second = scheduler.schedule(), scheduler.schedule()
        take_in(scheduler, first, a=2)
        scheduler.add(make_request("a", [8, 9], max_tokens=9))
        third = scheduler.schedule()
        assert (third.finished_ids, third.num_scheduled_tokens) == (["a"], {"a": 2})
        assert take_in(scheduler, second, a=51) == []
        assert scheduler.update_from_output(second, ModelRunnerOutput({}, {"a": "late as well"})) == []
        assert take_in(scheduler, third, a=52)[0].new_token_ids == [52]

    def test_only_known_tokens_are_found_in_the_cache(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [5, 6, 7], max_tokens=9))
        first, second = scheduler.schedule(), scheduler.schedule()  # the second fills the block, with who knows what
        scheduler.add(make_request("b", [5, 6, 7, 50, 1], max_tokens=9))
        assert scheduler.schedule().new[0].num_computed_tokens == 0
        take_in(scheduler, first, a=50)
        take_in(scheduler, second, a=51)
        scheduler.schedule()
        scheduler.add(make_request("c", [5, 6, 7, 50, 1], max_tokens=9))
        assert scheduler.schedule().new[0].num_computed_tokens == 4

    def test_what_the_last_step_filled_can_be_found_after_the_end(self, make_scheduler, make_request):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [5, 6, 7], max_tokens=2))
        first, second = scheduler.schedule(), scheduler.schedule()
        take_in(scheduler, first, a=50)
        take_in(scheduler, second, a=51)
        scheduler.add(make_request("b", [5, 6, 7, 50, 51], max_tokens=9))
        assert scheduler.schedule().new[0].num_computed_tokens == 4


class TestPreemptedOnTheWay:
    @pytest.fixture
    def scheduler(self, make_scheduler, make_request):
        """ "b" was preempted while a token of it is on its way; the output of that step."""
        scheduler = make_scheduler(num_blocks=5, max_model_len=16)
        for name, prompt in (("a", range(10, 18)), ("b", range(20, 28))):
            scheduler.add(make_request(name, prompt, max_tokens=8))
        scheduler.first = scheduler.schedule()
        assert scheduler.schedule().preempted_ids == ["b"]
        return scheduler

    def test_the_token_counts(self, scheduler):
        _, output = take_in(scheduler, scheduler.first, a=2, b=60)
        assert (output.request_id, output.new_token_ids, output.num_preemptions) == ("b", [60], 1)
        (resumed,) = scheduler.schedule().new
        assert (resumed.token_ids, resumed.num_prompt_tokens) == ([*range(20, 28), 60], 8)

    def test_it_does_not_start_again_before_the_token_is_there(self, scheduler):
        scheduler.abort(["a"])
        assert scheduler.schedule().new == []
        assert scheduler.waiting.head_refusal == Refusal(WaitReason.TOKEN_ON_ITS_WAY, 1)
        take_in(scheduler, scheduler.first, b=60)
        assert len(scheduler.schedule().new) == 1

    def test_it_may_end_while_it_waits(self, scheduler):
        outputs = take_in(scheduler, scheduler.first, a=50, b=2)
        assert outputs[1].finish_reason is FinishReason.STOP
        assert scheduler.stats().waiting == 0
        assert scheduler.schedule().finished_ids == []  # the workers dropped it before

    def test_it_may_fail_while_it_waits(self, scheduler):
        outputs = scheduler.update_from_output(scheduler.first, ModelRunnerOutput({"a": [50]}, {"b": "no logits"}))
        assert outputs[0].finish_reason is FinishReason.ERROR
        assert scheduler.stats().waiting == 0


class Slow(FakeExecutor):
    """Nothing is done before `release` of the step, as if the workers took their time."""

    def __init__(self, **options):
        super().__init__(**options)
        self.log = []
        self._results = []

    def execute_model(self, output):
        self.log.append(f"execute {output.step}")
        return super().execute_model(output)

    def sample_tokens(self, bitmask=None):
        self.log.append(f"sample {self.outputs[-1].step}" + (f" under {bitmask}" if bitmask else ""))
        sampled = super().sample_tokens(None)
        return Waited(self.log, self.outputs[-1].step, sampled.result())


class Waited(Future):
    def __init__(self, log, step, value):
        super().__init__()
        self._log, self._step = log, step
        self.set_result(value)

    def result(self, timeout=None):
        self._log.append(f"wait {self._step}")
        return super().result(timeout)


def make_async(make_core, **options):
    executor = Slow(next_token=options.pop("next_token", lambda token_ids: 9))
    return make_core(executor=executor, async_scheduling=True, **options), executor


def run(core):
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    return outputs


class TestQueueOfSteps:
    def test_two_steps_are_on_their_way_before_the_first_result_is_read(self, make_core, make_add):
        core, executor = make_async(make_core)
        core.add(make_add("a", max_tokens=3))
        assert core.step().outputs == []
        assert executor.log == ["execute 1", "sample 1"]
        assert core.step().outputs[0].new_token_ids == [9]
        assert executor.log[2:] == ["execute 2", "sample 2", "wait 1"]
        assert [output.new_token_ids for output in run(core)] == [[9], [9]]
        assert executor.worker.rows == {}

    def test_without_it_each_result_is_read_first(self, make_core, make_add):
        executor = Slow(next_token=lambda token_ids: 9)
        core = make_core(executor=executor)
        core.add(make_add("a", max_tokens=2))
        run(core)
        assert executor.log == [f"{what} {n}" for n in (1, 2, 3) for what in ("execute", "sample", "wait")]

    def test_an_abort_while_the_last_step_runs_ends_as_aborted(self, make_core, make_add):
        core, _ = make_async(make_core)
        core.add(make_add("a", max_tokens=1))
        core.step()
        (output,) = core.step(lambda: ["a"]).outputs
        assert (output.finish_reason, output.new_token_ids) == (FinishReason.ABORT, [])
        assert run(core) == []

    def test_a_failure_names_its_own_step(self, make_core, make_add, caplog):
        class Broken(Slow):
            def execute_model(self, output):
                if output.step < 2:
                    return super().execute_model(output)
                future = Future()
                future.set_exception(RuntimeError("device lost"))
                return future

        core = make_core(executor=Broken(), async_scheduling=True)
        core.add(make_add("a", max_tokens=5, ignore_eos=True))
        core.step()
        core.step()  # takes in the first
        with pytest.raises(RuntimeError, match="device lost"):
            core.step()
        assert "step 2 failed; tokens scheduled: {'a': 1}" in caplog.text


class Grammar:
    """Rows of requests whose id begins with "g" are restricted; they need their newest token first."""

    def __init__(self):
        self.requests = {}
        self.is_compiling = True

    def add(self, request):
        """They become known when they are asked about."""

    def remove(self, request_id):
        self.requests.pop(request_id, None)

    def check(self, params):
        """All are fine."""

    def take_failures(self):
        return {}

    def accept(self, request, token_id):
        return None

    def has_ended(self, request):
        return False

    def close(self):
        """Nothing is open."""

    def refusal(self, request):
        self.requests[request.request_id] = request
        compiling = self.is_compiling and request.request_id.startswith("g")
        return Refusal(WaitReason.PAUSED) if compiling else None

    def must_wait(self, output):
        rows = [self.requests[name] for name in output.num_scheduled_tokens if name.startswith("g")]
        return any(request.num_output_placeholders > 1 for request in rows)

    def bitmask(self, output):
        rows = [self.requests[name] for name in output.num_scheduled_tokens if name.startswith("g")]
        known = [request.num_output_tokens for request in rows if request.num_output_placeholders]
        return f"{known}" if known else None


class TestGrammar:
    def test_its_rows_are_sampled_when_their_newest_token_is_known(self, make_core, make_add):
        core, executor = make_async(make_core, grammar=(grammar := Grammar()))
        grammar.is_compiling = False
        for name in ("g", "free"):
            core.add(make_add(name, max_tokens=3))
        run(core)
        assert executor.log[:3] == ["execute 1", "sample 1 under [0]", "execute 2"]
        assert executor.log[3:6] == ["wait 1", "sample 2 under [1]", "execute 3"]
        assert [entry for entry in executor.log if "under" in entry] == [
            f"sample {n + 1} under [{n}]" for n in range(3)
        ]

    def test_other_steps_do_not_wait(self, make_core, make_add):
        core, executor = make_async(make_core, grammar=Grammar())
        core.add(make_add("free", max_tokens=3))
        run(core)
        assert executor.log[:5] == ["execute 1", "sample 1", "execute 2", "sample 2", "wait 1"]

    def test_the_core_says_when_everybody_waits_for_something_else(self, make_core, make_add):
        core, executor = make_async(make_core, grammar=(grammar := Grammar()))
        core.add(make_add("g", max_tokens=1))
        core.step()
        assert core.has_work
        assert core.is_held
        assert executor.log == []
        grammar.is_compiling = False
        assert run(core)[0].finish_reason is FinishReason.LENGTH
        assert not core.is_held


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
class TestPause:
    @pytest.fixture
    def core(self, make_core, make_add, is_async):
        """One request runs, one waits for its place."""
        core = make_core(async_scheduling=is_async, max_num_seqs=1, executor=FakeExecutor(next_token=lambda ids: 9))
        for name in ("runs", "waits"):
            core.add(make_add(name, range(10, 19), max_tokens=4))
        for _ in range(2):
            core.step()
        return core

    def answer(self, core, *args):
        """The reply to a pause, and all that was said until then."""
        reply, outputs = core.call(Call(3, "pause", list(args))), []
        while reply is None:
            assert core.has_work
            step = core.step()
            outputs += step.outputs
            reply = step.reply
        assert reply.call_id == 3
        return reply, outputs

    def test_abort_ends_everything(self, core):
        reply, outputs = self.answer(core)
        assert reply.result is True
        outputs += run(core)
        assert {output.request_id: output.finish_reason for output in outputs} == dict.fromkeys(
            ("runs", "waits"), FinishReason.ABORT
        )
        assert core.stats().blocks_free == 32

    def test_wait_lets_what_has_begun_finish(self, core):
        reply, outputs = self.answer(core, "wait")
        assert reply.result is True
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert {output.request_id for output in outputs} == {"runs"}
        assert not core.has_work
        assert core.stats().waiting == 1
        core.resume()
        assert run(core)[-1].request_id == "waits"

    def test_keep_leaves_everything_where_it_is(self, core):
        reply, early = self.answer(core, "keep")
        assert reply.result is True
        assert not core.has_work
        assert (core.stats().running, core.stats().waiting) == (1, 1)
        assert core.call(Call(4, "is_paused")).result is True
        assert core.call(Call(5, "resume")).result is True
        assert core.call(Call(6, "resume")).result is False
        tokens = [
            token for output in early + run(core) if output.request_id == "runs" for token in output.new_token_ids
        ]
        assert len(tokens) in (2, 3)  # those that were not taken in before

    def test_keep_may_give_up_all_memory(self, core):
        self.answer(core, "keep", True)
        assert core.stats().blocks_free == 32
        assert run(core) == []  # the workers hear of it
        core.resume()
        outputs = run(core)
        assert [output.request_id for output in outputs if output.finish_reason] == ["runs", "waits"]
        assert outputs[0].num_preemptions == 1
        assert outputs[-1].num_cached_tokens == 8  # of what "runs" computed since

    def test_requests_that_come_meanwhile_wait(self, core, make_add):
        self.answer(core, "abort")
        run(core)
        core.add(make_add("late"))
        assert not core.has_work
        assert core.step().outputs == []
        core.resume()
        assert {output.request_id for output in run(core)} == {"late"}

    def test_a_resume_answers_a_pause_that_still_waits(self, core):
        assert core.call(Call(3, "pause", ["wait"])) is None
        core.resume()
        assert core.step().reply.result is False

    def test_an_unknown_mode_is_the_callers_error(self, core):
        reply = core.call(Call(3, "pause", ["sometime"]))
        assert "unknown pause mode 'sometime'; there are: abort, keep, wait" in reply.error
        assert not core.is_paused()
