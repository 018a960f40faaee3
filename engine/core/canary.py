"""A short answer that an engine with the right weights gives again and again."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.core.kv.spec import KVCacheConfig
from inferd.engine.core.output import BlockIds, KnownRequests, NewRequest, SchedulerOutput
from inferd.engine.executor.base import Executor
from inferd.engine.params import SamplingParams

NUM_PROMPT_TOKENS = 16
NUM_TOKENS = 4
REQUEST_ID = "canary"
_STRIDE = 7919  # a prime, so that the prompt goes over the whole vocabulary


class Canary:
    """A prompt of made-up tokens, continued greedily past the scheduler, by steps that it would give out as well.

    For an engine whose blocks are all free and whose workers hold no request.
    """

    def __init__(self, config: KVCacheConfig, vocab_size: int, max_model_len: int) -> None:
        room = min(_num_slots(config), max_model_len)
        self._num_prompt_tokens = max(0, min(NUM_PROMPT_TOKENS, room - 1))
        self._num_tokens = min(NUM_TOKENS, room - self._num_prompt_tokens)
        self._prompt = [(1 + index) * _STRIDE % vocab_size for index in range(self._num_prompt_tokens)]
        self._block_ids = _first_blocks(config, self._num_prompt_tokens + self._num_tokens)

    def sing(self, executor: Executor) -> list[int]:
        """The tokens, fewer when the model gives none, or memory has no room for two. Blocks for as many steps."""
        if not self._prompt:
            return []
        new = NewRequest(
            request_id=REQUEST_ID,
            token_ids=self._prompt,
            num_prompt_tokens=self._num_prompt_tokens,
            params=SamplingParams(temperature=0.0, max_tokens=self._num_tokens, ignore_eos=True),
            seed=0,
            block_ids=self._block_ids,
            num_computed_tokens=0,
        )
        tokens = _run(executor, _step([new], KnownRequests(), self._num_prompt_tokens))
        while tokens and len(tokens) < self._num_tokens:
            num_computed = self._num_prompt_tokens + len(tokens) - 1
            sung = _run(executor, _step([], KnownRequests([REQUEST_ID], [None], [num_computed]), 1))
            if not sung:
                break
            tokens += sung
        _run(executor, _step([], KnownRequests(), 0))
        return tokens


def _num_slots(config: KVCacheConfig) -> int:
    """Tokens of one request that fit when the groups divide the blocks evenly."""
    blocks_a_group = (config.num_blocks - 1) // len(config.groups)
    return min(blocks_a_group * group.spec.block_size for group in config.groups)


def _first_blocks(config: KVCacheConfig, num_tokens: int) -> BlockIds:
    """From the null block on, each block in one group."""
    block_ids: list[list[int]] = []
    first = 1
    for group in config.groups:
        count = -(-num_tokens // group.spec.block_size)
        block_ids.append(list(range(first, first + count)))
        first += count
    return tuple(block_ids)


def _step(new: Sequence[NewRequest], known: KnownRequests, num_tokens: int) -> SchedulerOutput:
    """Without tokens: the workers forget the request."""
    return SchedulerOutput(
        step=0,
        new=list(new),
        known=known,
        num_scheduled_tokens={REQUEST_ID: num_tokens} if num_tokens else {},
        total_num_scheduled_tokens=num_tokens,
        shared_prefixes=[],
        finished_ids=[] if num_tokens else [REQUEST_ID],
        preempted_ids=[],
    )


def _run(executor: Executor, output: SchedulerOutput) -> list[int]:
    executed, sampled = executor.execute_model(output), executor.sample_tokens()
    executed.result()
    return sampled.result().sampled_token_ids.get(REQUEST_ID, [])
