"""One engine without a process: start, requests, steps, calls."""

from __future__ import annotations

import logging

import pytest

from inferd.engine.errors import ConfigError, ContextLengthExceeded, InvalidRequest, NotSupported
from inferd.engine.messages import Call, FinishReason, MultimodalFeature
from inferd.engine.testing.fake_executor import FakeExecutor


def always(token_id):
    return lambda token_ids: token_id


def run(core):
    """Step until nothing is left; every output in order."""
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    return outputs


class TestStep:
    def test_a_request_runs_to_its_end_and_the_worker_hears_of_it(self, make_core, make_add):
        executor = FakeExecutor(next_token=always(9))
        core = make_core(executor=executor)
        core.add(make_add("a", max_tokens=3))
        outputs = [core.step().outputs for _ in range(3)]
        assert [output.new_token_ids for (output,) in outputs] == [[9], [9], [9]]
        assert outputs[-1][0].finish_reason is FinishReason.LENGTH
        assert core.has_work
        assert core.step().outputs == []
        assert executor.outputs[-1].finished_ids == ["a"]
        assert not core.has_work

    def test_an_idle_step_leaves_the_workers_alone(self, make_core):
        executor = FakeExecutor()
        core = make_core(executor=executor)
        assert core.step().outputs == []
        assert executor.outputs == []

    def test_every_step_reports_stats(self, make_core, make_add):
        core = make_core()
        core.add(make_add("a", max_tokens=3))
        stats = core.step().stats
        assert (stats.running, stats.step, stats.blocks_total, stats.blocks_free) == (1, 1, 32, 31)

    def test_an_abort_during_the_last_step_ends_as_aborted(self, make_core, make_add):
        core = make_core(executor=FakeExecutor(next_token=always(9)))
        core.add(make_add("a", max_tokens=1))
        core.add(make_add("b", max_tokens=1))
        outputs = {output.request_id: output for output in core.step(drain_aborts=lambda: ["a", "gone"]).outputs}
        assert (outputs["a"].finish_reason, outputs["a"].new_token_ids) == (FinishReason.ABORT, [])
        assert outputs["b"].finish_reason is FinishReason.LENGTH

    def test_aborts_are_answered_in_an_idle_step_too(self, make_core, make_add):
        core = make_core()
        assert core.step(drain_aborts=lambda: ["nobody"]).outputs == []

    def test_abort_all_leaves_nothing(self, make_core, make_add):
        core = make_core(max_num_seqs=1)
        for name in "ab":
            core.add(make_add(name, max_tokens=30))
        core.step()
        assert {output.finish_reason for output in core.abort_all()} == {FinishReason.ABORT}
        assert run(core) == []
        assert core.stats().blocks_free == 32

    def test_a_failing_worker_is_fatal_and_leaves_a_trace(self, make_core, make_add, caplog):
        class Broken(FakeExecutor):
            def execute_model(self, output):
                raise RuntimeError("device lost")

        core = make_core(executor=Broken())
        core.add(make_add("a"))
        with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="device lost"):
            core.step()
        assert "step 1 failed; tokens scheduled: {'a': 3}" in caplog.text

    def test_shutdown_reaches_the_executor(self, make_core):
        executor = FakeExecutor()
        make_core(executor=executor).shutdown()
        assert executor.is_shut_down


class TestPrefixCache:
    @pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8)])
    def test_a_prompt_run_twice_reports_its_cached_tokens(self, make_core, make_add, length, cached):
        core = make_core()
        for name in ("first", "second"):
            core.add(make_add(name, range(10, 10 + length), max_tokens=1))
            (output,) = run(core)
        assert output.num_cached_tokens == cached

    def test_salts_never_share(self, make_core, make_add):
        core = make_core()
        hits = []
        for index, salt in enumerate(["a", "b", None, "a"]):
            core.add(make_add(str(index), range(10, 19), max_tokens=1, cache_salt=salt))
            hits += [output.num_cached_tokens for output in run(core)]
        assert hits == [0, 0, 0, 8]

    def test_it_can_be_off(self, make_core, make_add):
        core = make_core(enable_prefix_caching=False)
        for name in ("first", "second"):
            core.add(make_add(name, range(10, 19), max_tokens=1))
            (output,) = run(core)
        assert output.num_cached_tokens == 0

    def test_engines_hash_differently_unless_told_otherwise(self, make_core, make_add):
        def hashes(**options):
            return make_core(**options).make_request(make_add(prompt=range(10, 18))).block_hashes

        assert hashes() != hashes()
        assert hashes(hash_seed=b"x") == hashes(hash_seed=b"x")


class TestRequests:
    @pytest.mark.parametrize(
        ("add", "error", "param"),
        [
            ({"prompt": []}, InvalidRequest, "prompt"),
            ({"prompt": [5, 97]}, InvalidRequest, "prompt"),
            ({"prompt": [-1]}, InvalidRequest, "prompt"),
            ({"prompt": [5] * 64}, ContextLengthExceeded, "messages"),
            ({"stop_token_ids": [97]}, InvalidRequest, "stop_token_ids"),
            ({"features": [MultimodalFeature("cat", 0, 1)]}, NotSupported, "features"),
            ({"priority": 1}, NotSupported, "priority"),
            ({"lane": "fast"}, InvalidRequest, "lane"),
        ],
    )
    def test_a_bad_request_is_refused_and_leaves_no_trace(self, make_core, make_add, add, error, param):
        core = make_core(policy="fcfs")
        with pytest.raises(error) as raised:
            core.add(make_add("a", **add))
        assert raised.value.param == param
        assert not core.has_work

    def test_an_unknown_token_id_is_named(self, make_core, make_add):
        message = "token id 400 in prompt is outside the vocabulary; ids run from 0 to 96"
        with pytest.raises(InvalidRequest, match=message):
            make_core().add(make_add(prompt=[5, 400, -3]))

    def test_the_longest_prompt_gets_one_token(self, make_core, make_add):
        core = make_core()
        core.add(make_add(prompt=[5] * 63, max_tokens=None))
        (output,) = run(core)
        assert output.finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize(("max_tokens", "room"), [(None, 61), (500, 61), (7, 7)])
    def test_max_tokens_is_cut_to_the_room(self, make_core, make_add, max_tokens, room):
        assert make_core().make_request(make_add(max_tokens=max_tokens)).max_tokens == room

    def test_a_seed_is_the_requests_own_or_drawn_from_the_engines(self, make_core, make_add):
        core, twin, other = make_core(), make_core(), make_core(seed=1)
        assert core.make_request(make_add(seed=-7)).seed == -7
        drawn = [core.make_request(make_add()).seed for _ in range(3)]
        assert len(set(drawn)) == 3
        assert [twin.make_request(make_add()).seed for _ in range(3)] == drawn
        assert other.make_request(make_add()).seed != drawn[0]
        assert all(0 <= seed < 2**63 for seed in drawn)

    def test_a_seed_reaches_the_worker(self, make_core, make_add):
        executor = FakeExecutor()
        core = make_core(executor=executor)
        core.add(make_add(seed=42))
        core.step()
        assert executor.outputs[0].new[0].seed == 42


class TestStart:
    def test_memory_decides_the_number_of_blocks(self, make_core):
        core = make_core(executor=FakeExecutor(kv_bytes=100 * 128), num_blocks=None)
        assert core.kv_cache_config.num_blocks == 100

    def test_kv_cache_bytes_replaces_the_measurement(self, make_core):
        core = make_core(executor=FakeExecutor(kv_bytes=0), num_blocks=None, kv_cache_bytes=50 * 128)
        assert core.kv_cache_config.num_blocks == 50

    def test_too_little_memory_is_a_clear_error(self, make_core):
        with pytest.raises(ConfigError, match="lower max_model_len to at most 36"):
            make_core(executor=FakeExecutor(kv_bytes=10 * 128), num_blocks=None)


class TestCalls:
    def test_stats_by_name(self, make_core):
        reply = make_core().call(Call(7, "stats"))
        assert reply.call_id == 7
        assert reply.result["blocks_total"] == 32

    def test_the_prefix_cache_is_reset_only_when_idle(self, make_core, make_add):
        core = make_core()
        core.add(make_add("a", range(10, 19), max_tokens=2))
        core.step()
        assert core.call(Call(1, "reset_prefix_cache")).result is False
        run(core)
        assert core.call(Call(2, "reset_prefix_cache")).result is True
        core.add(make_add("b", range(10, 19), max_tokens=1))
        assert run(core)[0].num_cached_tokens == 0

    @pytest.mark.parametrize("method", ["shutdown", "__init__", "_check", ""])
    def test_only_listed_names_can_be_called(self, make_core, method):
        executor = FakeExecutor()
        reply = make_core(executor=executor).call(Call(1, method))
        assert reply.error.startswith(f"unknown call {method!r}; there are: ")
        assert {"is_paused", "pause", "reset_prefix_cache", "resume", "stats"} <= set(
            reply.error.partition("there are: ")[2].split(", ")
        )
        assert not executor.is_shut_down

    def test_a_failing_call_is_the_callers_error(self, make_core):
        reply = make_core().call(Call(1, "stats", ["surprise"]))
        assert reply.error.startswith("stats: TypeError")
