"""An executor without a model: it replays the scheduler's output as a worker would, and checks every word of it.

Each slot of its KV memory holds a digest of all tokens up to the one stored there. So a block that is hit by the wrong
request, evicted while in use, or overwritten is found at the step where it happens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from inferd.engine.core.kv.spec import KVCacheConfig, KVSpec, SlidingWindowSpec, window_of
from inferd.engine.core.output import BlockIds, ModelRunnerOutput, NewRequest, SchedulerOutput, SharedPrefix
from inferd.engine.executor.base import OnFailure
from inferd.engine.lora.adapter import NO_ADAPTER
from inferd.engine.messages import KV_CACHE, WEIGHTS, MemoryRecord, SleepReport, WakeReport
from inferd.engine.params import SamplingParams

T = TypeVar("T")
NextToken = Callable[[Sequence[int]], int]
Draft = Callable[[Sequence[int], int], list[int]]  # all tokens of a request, and how many are wanted → guesses

FAKE_WEIGHTS_BYTES = 1000
_MODULUS = (1 << 61) - 1


def digest_after(digest: int, token_id: int) -> int:
    """Digest of a token sequence from the digest of all but its last token."""
    return (digest * 1_000_003 + token_id + 1) % _MODULUS


def scrambled(vocab_size: int) -> NextToken:
    """The next token as a function of all tokens before it, and of nothing else."""

    def next_token(token_ids: Sequence[int]) -> int:
        digest = 0
        for token_id in token_ids:
            digest = digest_after(digest, token_id)
        return digest // 7 % vocab_size

    return next_token


@dataclass
class FakeRow:
    """What a worker knows of one request."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    block_ids: BlockIds
    num_computed_tokens: int
    lora_id: int
    num_drafts: int = 0  # of `token_ids`, the last ones


class FakeWorker:
    """Worker state rebuilt from nothing but `SchedulerOutput`s and its own samples.

    `windows`: of each KV group's layers; None where they look at everything.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.rows: dict[str, FakeRow] = {}
        self.memory: dict[int, int] = {}  # slot → digest; a slot never written is absent
        self.adapters: dict[int, int] = {NO_ADAPTER: 0}  # by id: what every digest of a row with it begins with
        self.missing: set[str] = set()  # tags of what was given back
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._windows = windows

    def apply(self, output: SchedulerOutput) -> None:
        """Take over what changed, then store the step's tokens; afterwards `sample` may be called once."""
        scheduled = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(scheduled.values())
        assert not (scheduled and self.missing), f"a step without {self.missing}"
        self._forget(output.finished_ids + output.preempted_ids)
        for new in output.new:
            self._add(new)
        self._update_known(output)
        assert sorted(scheduled) == sorted([new.request_id for new in output.new] + output.known.request_ids)
        for prefix in output.shared_prefixes:
            self._check_shared(prefix, scheduled)
        assert len(set(self._members(output))) == len(self._members(output)), "a request is in two shared prefixes"
        for request_id, drafts in output.drafts.items():
            self.rows[request_id].token_ids += drafts
            self.rows[request_id].num_drafts = len(drafts)
        self._store(scheduled)
        for request_id in scheduled:
            self._check_memory(request_id, scheduled[request_id])

    def sample(self, scheduled: Mapping[str, int], next_token: NextToken) -> dict[str, list[int]]:
        """Advance, and sample for each request that has caught up with its known tokens."""
        sampled: dict[str, list[int]] = {}
        for request_id, num_tokens in scheduled.items():
            row = self.rows[request_id]
            row.num_computed_tokens += num_tokens
            if row.num_computed_tokens == len(row.token_ids):
                sampled[request_id] = self._check_drafts(row, next_token)
        return sampled

    @staticmethod
    def _check_drafts(row: FakeRow, next_token: NextToken) -> list[int]:
        """Sample in place of each draft until one differs."""
        start = len(row.token_ids) - row.num_drafts
        found: list[int] = []
        for end in range(start, len(row.token_ids) + 1):
            found.append(next_token(row.token_ids[:end]))
            if row.token_ids[end : end + 1] != found[-1:]:
                break
        row.num_computed_tokens -= row.num_drafts - (len(found) - 1)
        row.token_ids[start:] = found
        row.num_drafts = 0
        return found

    def _forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            assert request_id in self.rows, f"told to forget {request_id}, which is not here"
            del self.rows[request_id]

    def _add(self, new: NewRequest) -> None:
        assert new.request_id not in self.rows, f"{new.request_id} came as new while it is here"
        self.rows[new.request_id] = FakeRow(
            list(new.token_ids),
            new.num_prompt_tokens,
            new.params,
            new.seed,
            tuple(list(ids) for ids in new.block_ids),
            new.num_computed_tokens,
            new.lora_id,
        )

    def _update_known(self, output: SchedulerOutput) -> None:
        known = output.known
        columns = zip(known.request_ids, known.new_block_ids, known.num_computed_tokens, strict=True)
        for request_id, new_block_ids, num_computed_tokens in columns:
            row = self.rows[request_id]
            assert row.num_computed_tokens == num_computed_tokens, f"{request_id}: worker and scheduler differ"
            for table, ids in zip(row.block_ids, new_block_ids or ([],) * len(row.block_ids), strict=True):
                table += ids

    def _store(self, scheduled: Mapping[str, int]) -> None:
        """Every row's keys and values, before any row attends."""
        written: set[int] = set()
        for request_id, num_tokens in scheduled.items():
            row = self.rows[request_id]
            end = row.num_computed_tokens + num_tokens
            assert num_tokens > 0, f"{request_id} is scheduled for nothing"
            assert end <= len(row.token_ids), f"{request_id} is scheduled past its known tokens"
            digests = self._digests(row, end)
            for group in range(len(self._windows)):
                for position in range(row.num_computed_tokens, end):
                    slot = self._slot(row, position, group)
                    assert slot not in written, f"slot {slot} is written twice in one step"
                    written.add(slot)
                    self.memory[slot] = digest_after(digests[position], group)

    def _check_memory(self, request_id: str, num_tokens: int) -> None:
        """Everything that the step's first query looks at, and what comes after it."""
        row = self.rows[request_id]
        digests = self._digests(row, row.num_computed_tokens + num_tokens)
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, row.num_computed_tokens - window + 1)
            for position in range(first, len(digests)):
                found = self.memory.get(self._slot(row, position, group))
                expected = digest_after(digests[position], group)
                assert found == expected, f"{request_id}: wrong KV at {position} in group {group}"

    def _check_shared(self, prefix: SharedPrefix, scheduled: Mapping[str, int]) -> None:
        """Equal blocks, and all of them computed before this step: their memory is right already."""
        assert prefix.num_blocks > 0
        assert len(prefix.request_ids) > 1
        assert all(request_id in scheduled for request_id in prefix.request_ids)
        rows = [self.rows[request_id] for request_id in prefix.request_ids]
        leading = {tuple(row.block_ids[0][: prefix.num_blocks]) for row in rows}
        assert len(leading) == 1, f"tables differ within the shared prefix of {prefix.request_ids}"
        num_tokens = prefix.num_blocks * self._block_size
        for row in rows:
            assert row.num_computed_tokens >= num_tokens
            for position, digest in enumerate(self._digests(row, num_tokens)):
                found = self.memory.get(self._slot(row, position, 0))
                assert found == digest_after(digest, 0), f"shared prefix not computed: {position}"

    def _slot(self, row: FakeRow, position: int, group: int) -> int:
        block_id = row.block_ids[group][position // self._block_size]
        assert 0 < block_id < self._num_blocks, f"block {block_id} is the null block or does not exist"
        return block_id * self._block_size + position % self._block_size

    def _digests(self, row: FakeRow, num_tokens: int) -> list[int]:
        digests, digest = [], self.adapters[row.lora_id]
        for token_id in row.token_ids[:num_tokens]:
            digest = digest_after(digest, token_id)
            digests.append(digest)
        return digests

    @staticmethod
    def _members(output: SchedulerOutput) -> list[str]:
        return [request_id for prefix in output.shared_prefixes for request_id in prefix.request_ids]


class FakeExecutor:
    """Keeps the `Executor` protocol with a `FakeWorker`; remembers every output it was given."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        kv_bytes: int = 1 << 20,
        next_token: NextToken | None = None,
        windows: Sequence[int | None] = (None,),
        draft: Draft | None = None,
    ) -> None:
        """Two layers for each of `windows`. `draft` guesses where the scheduler asks for it."""
        self.outputs: list[SchedulerOutput] = []
        self.worker: FakeWorker | None = None
        self.is_shut_down = False
        self._kinds = [
            KVSpec(block_size, 1, 2, "float32")
            if window is None
            else SlidingWindowSpec(block_size, 1, 2, "float32", window)
            for window in windows
        ]
        self._kv_bytes = kv_bytes
        self._next_token = next_token or scrambled(vocab_size=97)
        self._draft = draft

    def kv_specs(self) -> dict[str, KVSpec]:
        return {f"layers.{index}": spec for index, spec in enumerate([*self._kinds, *self._kinds])}

    def available_kv_bytes(self) -> int:
        return self._kv_bytes

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        specs = [group.spec for group in config.groups]
        self.worker = FakeWorker(config.num_blocks, specs[0].block_size, [window_of(spec) for spec in specs])

    def warm_up(self) -> None:
        assert self.worker is not None, "warmed up before there is a KV cache"

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        assert self.worker is not None
        self.outputs.append(output)
        self.worker.apply(output)
        return _done(None)

    def sample_tokens(self, bitmask: Any | None = None) -> Future[ModelRunnerOutput]:
        assert self.worker is not None
        assert bitmask is None
        sampled = self.worker.sample(self.outputs[-1].num_scheduled_tokens, self._next_token)
        return _done(ModelRunnerOutput(sampled, drafts=self._make_drafts(self.outputs[-1], sampled)))

    def on_failure(self, callback: OnFailure) -> None:
        """Never told: it fails in a call or not at all."""

    def load_lora(self, adapter_id: int, path: str) -> str:
        """What the folder holds is its path."""
        assert self.worker is not None
        assert adapter_id not in self.worker.adapters
        self.worker.adapters[adapter_id] = 1 + zlib.crc32(path.encode())
        return path

    def unload_lora(self, adapter_id: int) -> None:
        assert self.worker is not None
        self.worker.adapters.pop(adapter_id, None)

    def sleep_refusal(self) -> str | None:
        return None

    def sleep(self, level: int) -> SleepReport:
        """What was stored is gone."""
        assert self.worker is not None
        released = {tag: self._tag_bytes(tag) for tag in (WEIGHTS, KV_CACHE)}
        self.worker.missing = set(released)
        self.worker.memory.clear()
        return SleepReport(released_bytes=released)

    def wake(self, tags: Sequence[str]) -> WakeReport:
        assert self.worker is not None
        self.worker.missing -= set(tags)
        return WakeReport(restored_bytes={tag: self._tag_bytes(tag) for tag in tags}, restored_s=dict.fromkeys(tags, 0))

    def memory(self) -> list[MemoryRecord]:
        return [MemoryRecord(weights=self._tag_bytes(WEIGHTS), kv=self._tag_bytes(KV_CACHE))]

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _make_drafts(self, output: SchedulerOutput, sampled: Mapping[str, list[int]]) -> dict[str, list[int]]:
        if self._draft is None or self.worker is None:
            return {}
        wanted = {name: number for name, number in output.num_drafts_wanted.items() if name in sampled}
        return {name: self._draft(self.worker.rows[name].token_ids, number) for name, number in wanted.items()}

    def _tag_bytes(self, tag: str) -> int:
        if self.worker is None or tag in self.worker.missing:
            return 0
        return self._kv_bytes if tag == KV_CACHE else FAKE_WEIGHTS_BYTES


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
