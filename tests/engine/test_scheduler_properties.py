"""Random loads: whatever the budget, the pool and the blocks are, every request gets what it would get alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.core.output import SchedulerOutput
from inferd.engine.messages import FinishReason
from inferd.engine.testing.fake_executor import FakeExecutor, FakeWorker, scrambled

MAX_MODEL_LEN = 40
VOCAB = 13  # small, so that the end-of-sequence token (2) comes up
NEXT_TOKEN = scrambled(VOCAB)


@dataclass(frozen=True)
class Job:
    arrival: int  # step
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    salt: str | None
    abort_after: int | None  # steps
    priority: int = 0
    client: str = "local"
    lane: str = "interactive"


@dataclass
class Run:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    sent: list[bytes] = field(default_factory=list)  # every SchedulerOutput
    worker_rows: list[bytes] = field(default_factory=list)  # the worker's state after each
    preemptions: int = 0


class RecordingExecutor(FakeExecutor):
    """Keeps what a worker process would have been sent, and its state after each step."""

    def __init__(self, run: Run, block_size: int) -> None:
        super().__init__(block_size=block_size, next_token=NEXT_TOKEN)
        self.run = run

    def execute_model(self, output):
        self.run.sent.append(msgspec.msgpack.encode(output))
        return super().execute_model(output)

    def sample_tokens(self, bitmask=None):
        sampled = super().sample_tokens(bitmask)
        self.run.worker_rows.append(msgspec.msgpack.encode(self.worker.rows))
        return sampled


@st.composite
def jobs(draw):
    """Prompts begin with a piece of one of two common texts, so that prefixes are hit and shared."""
    texts = [[(i * k + 3) % VOCAB for i in range(MAX_MODEL_LEN)] for k in (1, 5)]
    text = draw(st.sampled_from(texts))
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    prompt = text[: draw(st.integers(0, 24))] + own
    return Job(
        arrival=draw(st.integers(0, 12)),
        prompt=prompt,
        max_tokens=draw(st.integers(1, MAX_MODEL_LEN)),
        ignore_eos=draw(st.booleans()),
        salt=draw(st.sampled_from([None, None, "s"])),
        abort_after=draw(st.sampled_from([None, None, None, 0, 3, 9])),
        priority=draw(st.sampled_from([0, 0, -1, 2])),
        client=draw(st.sampled_from("ab")),
        lane=draw(st.sampled_from(["interactive", "batch"])),
    )


settings_of_engine = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([4, 8]),
        "hash_block_size": st.sampled_from([2, 4]),
        "budget": st.sampled_from([1, 2, 3, 7, 1000]),
        "max_num_seqs": st.sampled_from([1, 3, 16]),
        "enable_prefix_caching": st.booleans(),
        "spare_blocks": st.integers(0, 30),
        "policy": st.sampled_from(["fair", "fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 2, 5]),
        "async_scheduling": st.booleans(),
    }
)


def naive(job: Job) -> tuple[list[int], FinishReason]:
    """The request alone, without any machinery."""
    tokens: list[int] = []
    limit = min(job.max_tokens, MAX_MODEL_LEN - len(job.prompt))
    while len(tokens) < limit:
        tokens.append(NEXT_TOKEN(job.prompt + tokens))
        if tokens[-1] == 2 and not job.ignore_eos:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


def drive(make_core, make_add, load: list[Job], options: dict[str, int]) -> Run:
    options = dict(options)
    num_blocks = 1 + MAX_MODEL_LEN // options["block_size"] + options.pop("spare_blocks")
    run, clock = Run(), 0
    executor = RecordingExecutor(run, options["block_size"])
    core = make_core(executor=executor, num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, **options)
    names = {f"r{index}": job for index, job in enumerate(load)}
    while clock <= max(job.arrival for job in load) or core.has_work:
        for name, job in names.items():
            if job.arrival == clock:
                params = {"max_tokens": job.max_tokens, "ignore_eos": job.ignore_eos, "cache_salt": job.salt}
                params |= {"client": job.client, "lane": job.lane}
                params["priority"] = 0 if options.get("policy") == "fcfs" else job.priority
                core.add(make_add(name, job.prompt, **params))
        leaving = [name for name, job in names.items() if job.abort_after == clock - job.arrival]
        outputs = core.step(drain_aborts=lambda leaving=leaving: leaving).outputs
        for output in outputs:
            assert output.request_id not in run.reasons, "an output after the last one"
            run.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                run.reasons[output.request_id] = output.finish_reason
        if executor.outputs:
            check_step(core, executor, options)
        clock += 1
        assert clock < 3000, "the engine does not come to an end"
    run.preemptions = core.stats().preemptions
    check_end(core, executor)
    return run


def check_step(core, executor: FakeExecutor, options: dict[str, int]) -> None:
    scheduled = executor.outputs[-1].num_scheduled_tokens
    assert sum(scheduled.values()) <= options["budget"]
    assert len(scheduled) <= options["max_num_seqs"]
    assert core.stats().running <= options["max_num_seqs"]
    check_blocks(executor.worker, options["block_size"], options["enable_prefix_caching"])


def check_blocks(worker: FakeWorker, block_size: int, may_share: bool) -> None:
    """A block stands once in a table; in two tables only as a full one, at one place, after equal tokens."""
    contents: dict[int, set[tuple[int, ...]]] = {}
    users: Counter[int] = Counter()
    for row in worker.rows.values():
        table = row.block_ids[0]
        assert len(set(table)) == len(table)
        users.update(table)
        for index, block_id in enumerate(table):
            contents.setdefault(block_id, set()).add(tuple(row.token_ids[: (index + 1) * block_size]))
    for block_id in [block_id for block_id, count in users.items() if count > 1]:
        assert may_share
        (tokens,) = contents[block_id]
        assert len(tokens) % block_size == 0


def check_end(core, executor: FakeExecutor) -> None:
    stats = core.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.blocks_free == stats.blocks_total
    assert core.reset_prefix_cache()
    assert executor.worker.rows == {}


@settings(deadline=None, max_examples=200)
@given(st.lists(jobs(), min_size=1, max_size=12), settings_of_engine)
def test_every_request_gets_what_it_would_get_alone(make_core, make_add, load, options):
    run = drive(make_core, make_add, load, options)
    for index, job in enumerate(load):
        name = f"r{index}"
        tokens, reason = naive(job)
        got = run.tokens.get(name, [])
        if run.reasons[name] is FinishReason.ABORT:
            assert job.abort_after is not None
            assert got == tokens[: len(got)]
        else:
            assert (got, run.reasons[name]) == (tokens, reason)


def test_a_tight_pool_preempts_and_changes_nothing(make_core, make_add):
    load = [Job(i % 4, [(i + j) % VOCAB for j in range(9)], 25, True, None, None) for i in range(8)]
    for caching in (True, False):
        options = {"block_size": 4, "hash_block_size": 4, "budget": 64, "max_num_seqs": 16, "spare_blocks": 8}
        run = drive(make_core, make_add, load, options | {"enable_prefix_caching": caching})
        assert run.preemptions > 0
        assert [run.tokens[f"r{i}"] for i in range(8)] == [naive(job)[0] for job in load]


@pytest.mark.parametrize("is_async", [False, True])
def test_every_output_can_be_replayed_from_its_bytes(make_core, make_add, is_async):
    prompts = [[(i // 2 + j) % VOCAB for j in range(11)] for i in range(9)]
    load = [Job(i % 5, prompts[i], 20, True, None, abort_after=6 if i == 3 else None) for i in range(9)]
    options = {"block_size": 4, "hash_block_size": 2, "budget": 17, "max_num_seqs": 6, "spare_blocks": 6}
    run = drive(make_core, make_add, load, options | {"enable_prefix_caching": True, "async_scheduling": is_async})
    assert run.preemptions > 0
    replayed = FakeWorker(1 + MAX_MODEL_LEN // 4 + 6, 4)
    for sent, live_rows in zip(run.sent, run.worker_rows, strict=True):
        output = msgspec.msgpack.decode(sent, type=SchedulerOutput)
        assert msgspec.msgpack.encode(output) == sent
        replayed.apply(output)
        replayed.sample(output.num_scheduled_tokens, NEXT_TOKEN)
        assert msgspec.msgpack.encode(replayed.rows) == live_rows
    assert replayed.rows == {}
