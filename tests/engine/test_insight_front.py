"""Records, feed and request actions through the fronts, over engines in this process and in others."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.engine.bench.feed_cost import measure_feed_cost
from inferd.engine.bench.peers import Inferd
from inferd.engine.bench.workloads import Workload
from inferd.engine.config import EngineArgs
from inferd.engine.errors import EngineDeadError, EngineError
from inferd.engine.frontend.async_llm import AsyncLLM
from inferd.engine.frontend.llm import LLM
from inferd.engine.frontend.stats import FinishedChoice
from inferd.engine.insight.mirror import FeedMirror
from inferd.engine.insight.records import Reason, RequestState
from inferd.engine.messages import EngineOutputs, FeedUpdate, FinishReason
from inferd.engine.params import OutputKind, SamplingParams
from inferd.engine.testing.model_folder import make_model_folder

StartLLM = Callable[..., Awaitable[AsyncLLM]]
OPTIONS: dict[str, Any] = dict(executor="scripted", device="cpu", block_size=4, max_model_len=1024)
FOREVER = SamplingParams(max_tokens=900, ignore_eos=True, output_kind=OutputKind.DELTA)


@pytest.fixture
async def start_llm(tmp_path: Path) -> AsyncIterator[StartLLM]:
    started: list[AsyncLLM] = []

    async def start(*, max_num_seqs: int = 8, delay_s: float = 0.002) -> AsyncLLM:
        folder = make_model_folder(tmp_path / "model", delay_s=delay_s)
        args = EngineArgs(model=str(folder), max_num_seqs=max_num_seqs, **OPTIONS)
        started.append(await AsyncLLM.start(args, Path(os.environ["XDG_RUNTIME_DIR"])))
        return started[-1]

    yield start
    for llm in started:
        await llm.shutdown()


@pytest.fixture(params=[True, False], ids=["in-process", "process"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    run_dir = Path(os.environ["XDG_RUNTIME_DIR"])
    with LLM(make_model_folder(tmp_path / "model"), in_process=request.param, run_dir=run_dir, **OPTIONS) as llm:
        yield llm


@contextlib.asynccontextmanager
async def stream(llm: AsyncLLM, name: str, params: SamplingParams = FOREVER) -> AsyncIterator[asyncio.Task[str | None]]:
    """Runs meanwhile; the task's result is why it ended."""

    async def read() -> str | None:
        reason = None
        async for output in llm.generate("hello there", params, request_id=name):
            reason = output.outputs[0].finish_reason
        return None if reason is None else reason.value

    task = asyncio.create_task(read())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineDeadError):
            await task


async def follow(llm: AsyncLLM, until: Callable[[FeedMirror, FeedUpdate], bool]) -> FeedMirror:
    """What a reader of the feed has when `until` holds."""
    mirror = FeedMirror()
    async with contextlib.aclosing(llm.feed()) as feed:
        async for update in feed:
            mirror.apply(update)
            if until(mirror, update):
                break
    return mirror


def named(mirror: FeedMirror, name: str) -> Any:
    return next((record for record in mirror.records.values() if record.name == name), None)


class TestAsyncLLM:
    async def test_a_life_as_a_reader_sees_it(self, start_llm: StartLLM) -> None:
        llm = await start_llm()
        seen: list[FeedUpdate] = []
        short = SamplingParams(max_tokens=150, ignore_eos=True)

        def ended(mirror: FeedMirror, update: FeedUpdate) -> bool:
            seen.append(update)
            return any("finished_at" in fields for fields in update.requests)

        async with stream(llm, "chat-7", short) as task:
            await follow(llm, ended)
            assert await task == "length"
        assert [update.is_snapshot for update in seen][:2] == [True, False]
        last = seen[-1].requests[-1]
        assert (last["state"], last["finish_reason"], last["output_tokens"]) == ("finished", "length", 150)
        assert all(later.at - sooner.at >= 0.099 for sooner, later in pairwise(seen))
        assert sum(len(update.steps) for update in seen) <= len(seen)
        assert seen[-1].stats.generated_tokens == 150

    async def test_records_carry_the_callers_name_and_no_prompt(self, start_llm: StartLLM) -> None:
        llm = await start_llm()
        async with stream(llm, "chat-7"):
            mirror = await follow(llm, lambda mirror, _: named(mirror, "chat-7") is not None)
            (record,) = await llm.insight.records()
        assert record.name == "chat-7"
        assert record.id == named(mirror, "chat-7").id
        assert record.id.startswith("chat-7-")
        assert record.state in (RequestState.PREFILL, RequestState.DECODE)
        assert b"hello" not in msgspec.json.encode(record)

    async def test_actions_on_one_request(self, start_llm: StartLLM) -> None:
        llm = await start_llm()
        async with stream(llm, "a") as task:
            name = named(await follow(llm, lambda m, _: named(m, "a") is not None), "a").id
            assert await llm.insight.pause_request(name, by="ann")
            paused = named(await follow(llm, lambda m, _: named(m, "a").state is RequestState.PAUSED), "a")
            assert paused.reason is Reason.PAUSED_BY
            assert paused.reason_text.startswith("paused by ann ")
            assert await llm.insight.batch_mates(name) == []
            assert await llm.insight.resume_request(name)
            await follow(llm, lambda m, _: named(m, "a").state is RequestState.DECODE)
            assert await llm.insight.set_priority(name, -3)
            assert (await llm.insight.records())[0].priority == -3
            blocks = await llm.insight.block_map()
            assert sum(run.count for run in blocks.runs) == blocks.num_blocks == llm.ready.num_blocks
            assert await llm.insight.cancel(name)
            assert await task == "abort"
        assert await llm.insight.records() == []
        with pytest.raises(EngineError, match="no unfinished request"):
            await llm.insight.batch_mates(name)

    async def test_a_paused_request_is_told_of_while_the_engine_is_idle(self, start_llm: StartLLM) -> None:
        llm = await start_llm()
        async with stream(llm, "a"):
            name = named(await follow(llm, lambda m, _: named(m, "a") is not None), "a").id
            await llm.insight.pause_request(name)
            updates = 0

            def has_aged(mirror: FeedMirror, update: FeedUpdate) -> bool:
                nonlocal updates
                updates += 1
                record = named(mirror, "a")
                return record.state is RequestState.PAUSED and record.reason_text == "paused by admin 1 s ago"

            await follow(llm, has_aged)
            assert updates <= 5  # the snapshot, and one a second

    async def test_readers_share_one_subscription(self, start_llm: StartLLM) -> None:
        llm = await start_llm()
        async with stream(llm, "a"), contextlib.aclosing(llm.feed()) as early:
            first = await anext(early)
            late = await follow(llm, lambda mirror, _: named(mirror, "a") is not None)
            assert named(late, "a") is not None
            assert first.is_snapshot
            await asyncio.sleep(0.35)  # it does not read, and finds everything in one update
            merged = await anext(early)
            assert not merged.is_snapshot
            assert len(merged.requests) <= 1
        assert llm._client.on_feed is None

    async def test_a_start_tells_what_the_cache_holds(self, start_llm: StartLLM) -> None:
        ready = (await start_llm()).ready
        assert ready.kv_max_concurrency == (ready.num_blocks - 1) / 256  # blocks of a request of 1024 tokens
        assert ready.kv_cache_tokens == 4 * (ready.num_blocks - 1)

    async def test_nothing_is_sent_without_a_reader(self, start_llm: StartLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = await start_llm()
        feeds: list[FeedUpdate | None] = []
        inbox = llm._client._inbox
        put = inbox.put
        monkeypatch.setattr(inbox, "put", lambda outputs: (feeds.append(outputs.feed), put(outputs)))
        async with stream(llm, "a"):
            await follow(llm, lambda mirror, _: named(mirror, "a") is not None)
            assert any(feeds)
            feeds.clear()
            while len(feeds) < 150:  # noqa: ASYNC110 0.3 s of steps
                await asyncio.sleep(0.01)
            assert not any(feeds)

    async def test_the_feed_ends_with_its_engine(self, start_llm: StartLLM) -> None:
        llm = await start_llm()

        async def read() -> None:
            async for update in llm.feed():
                if update.is_snapshot:
                    llm._client.kill()

        with pytest.raises(EngineDeadError):
            await read()
        with pytest.raises(EngineDeadError):
            await anext(llm.feed())


class TestLLM:
    def test_a_watcher_is_told_of_a_whole_batch(self, llm: LLM) -> None:
        updates: list[FeedUpdate] = []
        with llm.insight.watch(updates.append):
            outputs = llm.generate(["one", "two", "three"], SamplingParams(max_tokens=300, ignore_eos=True))
        assert [output.num_output_tokens for output in outputs] == [300] * 3
        assert [update.is_snapshot for update in updates] == [True] + [False] * (len(updates) - 1)
        changes = [fields for update in updates for fields in update.requests]
        assert sorted(fields["output_tokens"] for fields in changes if "finished_at" in fields) == [300] * 3
        assert updates[-1].stats.generated_tokens == 900
        told = len(updates)
        llm.generate("four")
        assert len(updates) == told

    def test_one_watcher_at_a_time(self, llm: LLM) -> None:
        def watch() -> None:
            with llm.insight.watch(lambda update: None):
                pass

        with llm.insight.watch(lambda update: None), pytest.raises(EngineError, match="being watched already"):
            watch()
        watch()

    def test_questions_about_an_idle_engine(self, llm: LLM) -> None:
        assert llm.insight.records() == []
        blocks = llm.insight.block_map()
        assert sum(run.count for run in blocks.runs) == blocks.num_blocks
        assert not llm.insight.cancel("nobody")


class Log:
    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.tokens = 0
        self.ends: list[FinishedChoice] = []

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        self.gaps.append(seconds)
        self.tokens += count

    def finished(self, choice: FinishedChoice) -> None:
        self.ends.append(choice)


class TestLatencies:
    def test_counts_are_exact(self, llm: LLM) -> None:
        log = Log()
        llm._engine.observe(log)
        llm.generate([f"prompt {n}" for n in range(10)], SamplingParams(max_tokens=10, ignore_eos=True))
        assert (len(log.first), len(log.gaps), log.tokens, len(log.ends)) == (10, 90, 90, 10)
        assert min(log.first) > 0
        assert min(log.gaps) >= 0
        for end in log.ends:
            assert (end.finish_reason, end.output_tokens, end.max_tokens) == (FinishReason.LENGTH, 10, 10)
            assert (end.num_choices, end.longest_output_tokens) == (1, 10)
            assert end.queue_s is not None
            assert end.prefill_s is not None
            assert end.decode_s is not None
            assert end.inference_s == end.prefill_s + end.decode_s
            assert end.time_per_output_token_s == pytest.approx(end.decode_s / 9)
            assert end.e2e_s > 0

    def test_several_answers_to_one_prompt(self, llm: LLM) -> None:
        log = Log()
        llm._engine.observe(log)
        llm.generate("a prompt of some length", SamplingParams(n=3, max_tokens=5, ignore_eos=True))
        assert (len(log.first), len(log.gaps), len(log.ends)) == (3, 12, 3)
        assert sorted(end.num_choices is not None for end in log.ends) == [False, False, True]
        assert max(end.cached_tokens for end in log.ends) == 20
        assert all(end.computed_prompt_tokens + end.cached_tokens == end.prompt_tokens for end in log.ends)

    def test_ends_that_the_front_brings_about(self, llm: LLM) -> None:
        log = Log()
        llm._engine.observe(log)
        (output,) = llm.generate("hello", SamplingParams(max_tokens=50, ignore_eos=True, stop=[" ", "e", "a", "t"]))
        (end,) = log.ends
        assert (end.finish_reason, end.output_tokens) == (FinishReason.STOP, output.num_output_tokens)
        llm._engine.add_request("one that leaves", SamplingParams(max_tokens=50))
        llm._engine.abort_all()
        assert log.ends[-1].finish_reason is FinishReason.ABORT
        assert log.ends[-1].queue_s is None

    def test_an_observer_that_comes_late(self, llm: LLM) -> None:
        log = Log()
        engine = llm._engine
        engine.add_request("hello", SamplingParams(max_tokens=6, ignore_eos=True, output_kind=OutputKind.DELTA))
        while not engine.step():
            pass
        engine.observe(log)
        while engine.num_unfinished:
            engine.step()
        assert log.first == []
        (end,) = log.ends
        assert (end.queue_s, end.output_tokens) == (None, 6)


def test_the_cost_of_the_feed_is_measured(llm: LLM) -> None:
    workload = Workload("tiny", num_requests=3, shared_tokens=0, own_tokens=5, output_tokens=7)
    told: list[str] = []
    cost = measure_feed_cost(Inferd(llm), workload, 90, told.append)
    assert [line.split(":")[0] for line in told] == [f"feed {kind}" for kind in ("on", "off", "off", "on", "on", "off")]
    assert 0 < cost.share < 1
    assert cost.updates_per_s > 0
    assert "feed at tiny: " in str(cost)


def test_an_update_crosses_the_wire() -> None:
    update = FeedUpdate(1.5, True, [{"id": "a", "state": RequestState.DECODE, "eta_s": None}])
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(EngineOutputs(feed=update)), type=EngineOutputs).feed
    assert there is not None
    mirror = FeedMirror()
    mirror.apply(there)
    assert mirror.records["a"].state is RequestState.DECODE
