"""One request inside the scheduler."""

from __future__ import annotations

import enum
from collections.abc import Callable

from inferd.engine.insight.life import Life
from inferd.engine.logprobs import PromptLedger
from inferd.engine.lora.adapter import Adapter
from inferd.engine.messages import AddRequest, FinishReason
from inferd.engine.params import without_grammar


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


BlockHasher = Callable[["Request"], list[bytes]]


class Request:
    """Token bookkeeping of one request; owned and changed by the scheduler alone.

    There is no prefill and no decode: `num_computed_tokens` chases `num_tokens`, and `num_output_placeholders` stands
    for tokens of scheduled steps whose result is not known here yet.
    """

    def __init__(
        self,
        add: AddRequest,
        *,
        seed: int,
        max_tokens: int,
        block_hasher: BlockHasher | None = None,
        lora: Adapter | None = None,
    ) -> None:
        """`lora`: what `add.lora` names."""
        self.request_id = add.request_id
        self.name = add.name or add.request_id
        self.structured_output = add.params.structured_output
        self.min_tokens = add.params.min_tokens
        self.params = without_grammar(add.params)
        self.seed = seed
        self.max_tokens = max_tokens
        self.priority = add.priority
        self.client = add.client
        self.lane = add.lane
        self.arrival_time_s = add.arrival_time_s
        self.cache_salt = add.cache_salt
        self.features = add.features
        self.pooling = add.pooling
        self.lora = lora
        self.num_prompt_tokens = len(add.prompt_token_ids)
        wants_prompt_logprobs = add.params.prompt_logprobs is not None
        self.prompt_logprobs = PromptLedger(self.num_prompt_tokens) if wants_prompt_logprobs else None
        self.token_ids = list(add.prompt_token_ids)  # prompt, then output
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_cached_tokens = 0  # prompt tokens found in the cache at first admission
        self.num_preemptions = 0
        self.number = 0  # in order of arrival at the scheduler
        self.added_at_step = 0  # results of steps up to this one are not this request's, whatever its id
        self.preempted_for: str | None = None  # the request that its blocks went to; None when it made room for itself
        self.status = RequestStatus.WAITING
        self.life = Life()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None  # with FinishReason.ERROR
        self.error_param: str | None = None  # the field of the request that is to blame for it
        self.block_hashes: list[bytes] = []  # one per full hash block, grown as tokens come
        self._block_hasher = block_hasher
        if block_hasher is not None:
            self.block_hashes += block_hasher(self)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def needs_whole_prompt(self) -> bool:
        """Nothing of it may come from the prefix cache: every prompt token's logits are still wanted."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self._block_hasher is not None and (hashes := self._block_hasher(self)):
            self.block_hashes += hashes

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
