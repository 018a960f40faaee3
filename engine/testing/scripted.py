"""An executor without a model: whole engines, processes and daemons run on it in a second, without torch.

It stands behind the real scheduler and believes nothing: it replays the differences of each `SchedulerOutput` and fails
the engine when they do not add up. The next token is a function of all tokens of the request, so a token that was
lost, doubled or taken from another request changes everything after it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from inferd.engine.config import EngineConfig
from inferd.engine.core.kv.spec import KVCacheConfig, KVSpec
from inferd.engine.core.output import BlockIds, GrammarBitmask, ModelRunnerOutput, NewRequest, SchedulerOutput
from inferd.engine.errors import LoadError
from inferd.engine.executor.base import OnFailure
from inferd.engine.frontend.tokenizer import Tokenizer
from inferd.engine.lora.adapter import NO_ADAPTER
from inferd.engine.lora.config import CONFIG_NAME, WEIGHTS_NAME, read_adapter_config
from inferd.engine.messages import KV_CACHE, WEIGHTS, MemoryRecord, SleepReport, WakeReport

LETTERS = "abcdefghijklmnopqrstuvwxyz     "


class ScriptedOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The contents of `scripted.json` in the model folder."""

    load_s: float = 0.0
    delay_s: float = 0.0  # of every step
    kv_blocks: int = 512  # with the null block
    weights_bytes: int = 1 << 20
    fail_at_start: str | None = None  # the message of a `LoadError`
    fail_at_step: int | None = None  # counted from 1; fatal to the engine
    breaks: str | None = None  # a request with this text in its prompt fails at its first token
    replies: dict[str, str] = {}
    """Text in a prompt → what is answered, then end of sequence. The first that matches; "" matches every prompt."""


def read_options(folder: Path) -> ScriptedOptions:
    file = folder / "scripted.json"
    return msgspec.json.decode(file.read_bytes(), type=ScriptedOptions) if file.is_file() else ScriptedOptions()


@dataclass(slots=True)
class _Row:
    """A request as the workers know it."""

    token_ids: list[int]
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    reply: list[int] | None  # without a scripted reply, letters are made up
    min_tokens: int
    num_prompt_tokens: int
    breaks: bool
    checksum: int  # over all of `token_ids`, begun with what its adapter holds

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.checksum = _checksum([token_id], self.checksum)


class ScriptedExecutor:
    """Options come from `scripted.json` in the model folder, see `ScriptedOptions`."""

    def __init__(self, config: EngineConfig) -> None:
        self._options = read_options(config.model.path)
        time.sleep(self._options.load_s)
        if self._options.fail_at_start is not None:
            raise LoadError(self._options.fail_at_start)
        self._tokenizer = Tokenizer.from_folder(config.model.path)
        self._letters = [self._tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in LETTERS]
        self._replies = {key: self._tokenizer.encode(text) for key, text in self._options.replies.items()}
        self._eos_token_ids = config.model.eos_token_ids
        self._spec = KVSpec(
            block_size=config.cache.block_size,
            num_kv_heads=config.model.num_kv_heads,
            head_size=config.model.head_size,
            dtype=config.cache.dtype,
        )
        self._num_blocks = 0
        self._lora = config.lora
        self._adapters = {NO_ADAPTER: 0}  # by id: what checksums begin with
        self._missing: set[str] = set()  # tags of memory that was given back
        self._num_steps = 0
        self._rows: dict[str, _Row] = {}
        self._ready: list[str] = []  # rows of this step that have caught up with their known tokens

    @property
    def decisions(self) -> list[str]:
        return ["executor=scripted: answers are made up, there is no model"]

    def kv_specs(self) -> dict[str, KVSpec]:
        return {"scripted": self._spec}

    def available_kv_bytes(self) -> int:
        return self._options.kv_blocks * self._spec.page_bytes

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._num_blocks = config.num_blocks

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        done: Future[None] = Future()
        try:
            self._replay(output)
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)
        return done

    def sample_tokens(self, bitmask: GrammarBitmask | None = None) -> Future[ModelRunnerOutput]:
        """Where a grammar forbids the next token, one that it allows is taken instead, as arbitrary as the letters."""
        restricted = {} if bitmask is None else dict(zip(bitmask.request_ids, bitmask.words, strict=True))
        time.sleep(self._options.delay_s)
        sampled: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        for request_id in self._ready:
            row = self._rows[request_id]
            if row.breaks:
                errors[request_id] = "scripted failure of one request"
                row.append(self._letters[0])  # the next step may run this row too before anybody knows
                continue
            token_id = self._next_token(row)
            if request_id in restricted:
                token_id = _allowed(token_id, restricted[request_id], row.checksum)
            row.append(token_id)
            sampled[request_id] = [token_id]
        self._ready = []
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(ModelRunnerOutput(sampled, errors))
        return done

    def on_failure(self, callback: OnFailure) -> None:
        """Never told: it fails in a call or not at all."""

    def load_lora(self, adapter_id: int, path: str) -> str:
        assert self._lora is not None, "adapters in an engine that has none"
        folder = Path(path)
        read_adapter_config(folder, self._lora.max_lora_rank)
        held = b"".join((folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME))
        self._adapters[adapter_id] = zlib.crc32(held)
        return str(self._adapters[adapter_id])

    def unload_lora(self, adapter_id: int) -> None:
        self._adapters.pop(adapter_id, None)

    def sleep_refusal(self) -> str | None:
        return None

    def sleep(self, level: int) -> SleepReport:
        """Nothing that was computed before may be taken for granted afterwards."""
        released = self._tag_bytes()
        self._missing = set(released)
        return SleepReport(released_bytes=released)

    def wake(self, tags: Sequence[str]) -> WakeReport:
        """Weights take as long as at the start."""
        report = WakeReport()
        for tag in tags:
            began_s = time.monotonic()
            if tag == WEIGHTS:
                time.sleep(self._options.load_s)
            self._missing.discard(tag)
            report.restored_s[tag] = time.monotonic() - began_s
            report.restored_bytes[tag] = self._tag_bytes()[tag]
        return report

    def memory(self) -> list[MemoryRecord]:
        held = self._tag_bytes()
        return [MemoryRecord(weights=held[WEIGHTS], kv=held[KV_CACHE], resident=sum(held.values()))]

    def shutdown(self) -> None:
        self._rows.clear()

    def _tag_bytes(self) -> dict[str, int]:
        held = {WEIGHTS: self._options.weights_bytes, KV_CACHE: self._num_blocks * self._spec.page_bytes}
        return {tag: 0 if tag in self._missing else num_bytes for tag, num_bytes in held.items()}

    def _replay(self, output: SchedulerOutput) -> None:
        asleep = sorted(self._missing) if output.num_scheduled_tokens else []
        _require(not asleep, f"a step while {asleep} were given back")
        self._num_steps += 1
        if self._num_steps == self._options.fail_at_step:
            raise RuntimeError(f"scripted failure at step {self._num_steps}")
        for request_id in [*output.finished_ids, *output.preempted_ids]:
            del self._rows[request_id]
        for new in output.new:
            _require(new.request_id not in self._rows, f"{new.request_id} is new but was never dropped")
            self._rows[new.request_id] = self._make_row(new)
        known = output.known
        for request_id, blocks, num_computed in zip(
            known.request_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            self._update_row(request_id, blocks, num_computed)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._compute(request_id, num_tokens)
        scheduled = sum(output.num_scheduled_tokens.values())
        _require(scheduled == output.total_num_scheduled_tokens, f"{scheduled} tokens are scheduled, not the total")

    def _make_row(self, new: NewRequest) -> _Row:
        return _Row(
            token_ids=list(new.token_ids),
            num_computed_tokens=new.num_computed_tokens,
            block_ids=tuple(list(group) for group in new.block_ids),
            reply=self._reply_to(new.token_ids[: new.num_prompt_tokens]),
            min_tokens=new.params.min_tokens,
            num_prompt_tokens=new.num_prompt_tokens,
            breaks=self._options.breaks is not None
            and self._options.breaks in self._text_of(new.token_ids[: new.num_prompt_tokens]),
            checksum=_checksum(new.token_ids, self._adapters[new.lora_id]),
        )

    def _update_row(self, request_id: str, blocks: BlockIds | None, num_computed_tokens: int) -> None:
        row = self._rows[request_id]
        here = row.num_computed_tokens
        _require(
            here == num_computed_tokens, f"{request_id} has {here} computed tokens here, {num_computed_tokens} there"
        )
        for group, new_blocks in zip(row.block_ids, blocks or (), strict=False):
            group.extend(new_blocks)

    def _compute(self, request_id: str, num_tokens: int) -> None:
        row = self._rows[request_id]
        row.num_computed_tokens += num_tokens
        known, computed = len(row.token_ids), row.num_computed_tokens
        _require(num_tokens > 0 and computed <= known, f"{request_id}: {computed} tokens to compute, {known} known")
        for group in row.block_ids:
            room = len(group) * self._spec.block_size
            _require(computed <= room, f"{request_id}: {computed} tokens do not fit its {len(group)} blocks")
            _require(all(0 < block < self._num_blocks for block in group), f"{request_id}: block ids {group}")
        if computed == known:
            self._ready.append(request_id)

    def _next_token(self, row: _Row) -> int:
        position = len(row.token_ids) - row.num_prompt_tokens
        if row.reply is not None:
            if position < len(row.reply):
                return row.reply[position]
            if position == max(len(row.reply), row.min_tokens) and self._eos_token_ids:
                return self._eos_token_ids[0]
        return self._letters[row.checksum % len(self._letters)]

    def _reply_to(self, prompt_token_ids: list[int]) -> list[int] | None:
        if not self._replies:
            return None
        prompt = self._text_of(prompt_token_ids)
        return next((reply for key, reply in self._replies.items() if key in prompt), None)

    def _text_of(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _allowed(token_id: int, words: Any, choice: int) -> int:
    """`token_id`, or one of those whose bits are set."""
    allowed = [index for index in range(32 * len(words)) if int(words[index // 32]) >> index % 32 & 1]
    return token_id if token_id in allowed else allowed[choice % len(allowed)]


def _checksum(token_ids: list[int], before: int = 0) -> int:
    return zlib.crc32(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids), before)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(f"the scheduler's output does not add up: {message}")
