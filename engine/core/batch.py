"""The step that the scheduler is putting together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inferd.engine.config import SchedulerConfig
from inferd.engine.core.admission import Refusal, WaitReason
from inferd.engine.core.output import BlockIds, KnownRequests, NewRequest
from inferd.engine.lora.adapter import NO_ADAPTER
from inferd.engine.request import Request


@dataclass(slots=True)
class StepBatch:
    """What is in it counts as computed at once, so that the step after it can be scheduled before it has run."""

    budget: int
    long_prefill_threshold: int  # the most of one request; 0: all of the budget
    chunks: bool = True  # else all of a request's next tokens or none
    new: list[NewRequest] = field(default_factory=list)
    known: KnownRequests = field(default_factory=KnownRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_ids: list[str] = field(default_factory=list)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    num_claimed_blocks: int = 0  # free ones that running requests need for what they know already

    @classmethod
    def begin(cls, config: SchedulerConfig, preempted_ids: list[str]) -> StepBatch:
        """`preempted_ids`: since the last step."""
        threshold, chunks = config.long_prefill_token_threshold, config.enable_chunked_prefill
        return cls(config.max_num_batched_tokens, threshold, chunks, preempted_ids=preempted_ids)

    def cut(self, num_tokens: int) -> int:
        """How many of a request's next tokens the step takes; 0: it has to wait for a step with more budget."""
        if not self.chunks:
            return num_tokens if num_tokens <= self.budget else 0
        if self.long_prefill_threshold:
            return min(num_tokens, self.budget, self.long_prefill_threshold)
        return min(num_tokens, self.budget)

    def refusal(self, num_running: int, max_num_seqs: int) -> Refusal | None:
        """What it has no more of, for anybody. Who made room must not see it given to a newcomer."""
        if self.preempted_ids:
            return Refusal(WaitReason.PREEMPTION)
        if num_running >= max_num_seqs:
            return Refusal(WaitReason.SEQ_LIMIT, num_running + 1, max_num_seqs)
        if self.budget <= 0:
            return Refusal(WaitReason.TOKEN_BUDGET, 1, 0)
        return None

    def add_known(
        self, request: Request, num_new_tokens: int, new_block_ids: BlockIds, drafts: Sequence[int] = ()
    ) -> None:
        """`drafts` come on top of the new tokens, and only where these are all that it is behind."""
        self.known.request_ids.append(request.request_id)
        self.known.new_block_ids.append(new_block_ids or None)
        self.known.num_computed_tokens.append(request.num_computed_tokens)
        self._take(request, num_new_tokens)
        if drafts:
            self.drafts[request.request_id] = list(drafts)
            self.num_scheduled_tokens[request.request_id] += len(drafts)
            self.budget -= len(drafts)
            request.num_computed_tokens += len(drafts)  # those that turn out wrong are taken back

    def add_new(self, request: Request, num_new_tokens: int, block_ids: BlockIds) -> None:
        self.new.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                seed=request.seed,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
                features=list(request.features) if request.features else None,
                num_prompt_logprobs=request.prompt_logprobs.num_known if request.prompt_logprobs else 0,
                pooling=request.pooling,
                lora_id=request.lora.id if request.lora is not None else NO_ADAPTER,
            )
        )
        self._take(request, num_new_tokens)

    def _take(self, request: Request, num_new_tokens: int) -> None:
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.budget -= num_new_tokens
        request.num_computed_tokens += num_new_tokens
        if request.num_computed_tokens == len(request.token_ids) + request.num_output_placeholders:
            request.num_output_placeholders += 1  # it has caught up, so the step samples its next token


def longest_length(request: Request, max_model_len: int) -> int:
    """Tokens, prompt and output, that it cannot get past."""
    longest = request.num_prompt_tokens + request.max_tokens
    if longest > max_model_len:  # or a whole prompt, which is all that a request has that pools
        longest = max(max_model_len, request.num_prompt_tokens + 1)
    return longest


def num_tokens_behind(request: Request, max_model_len: int) -> int:
    """Tokens that a running request could compute now. Its very last one is never fed back, so it is never computed."""
    longest = longest_length(request, max_model_len)
    known = len(request.token_ids) + request.num_output_placeholders
    return (known if known < longest else longest - 1) - request.num_computed_tokens
