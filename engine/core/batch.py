"""The step that the scheduler is putting together."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferd.engine.core.output import BlockIds, KnownRequests, NewRequest
from inferd.engine.request import Request


@dataclass(slots=True)
class StepBatch:
    """What is in it counts as computed at once, so that the step after it can be scheduled before it has run."""

    budget: int
    long_prefill_threshold: int  # the most of one request; 0: all of the budget
    new: list[NewRequest] = field(default_factory=list)
    known: KnownRequests = field(default_factory=KnownRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_ids: list[str] = field(default_factory=list)
    num_claimed_blocks: int = 0  # free ones that running requests need for what they know already

    def cut(self, num_tokens: int) -> int:
        """How many of a request's next tokens the step takes."""
        if self.long_prefill_threshold:
            return min(num_tokens, self.budget, self.long_prefill_threshold)
        return min(num_tokens, self.budget)

    def add_known(self, request: Request, num_new_tokens: int, new_block_ids: BlockIds) -> None:
        self.known.request_ids.append(request.request_id)
        self.known.new_block_ids.append(new_block_ids or None)
        self.known.num_computed_tokens.append(request.num_computed_tokens)
        self._take(request, num_new_tokens)

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
            )
        )
        self._take(request, num_new_tokens)

    def _take(self, request: Request, num_new_tokens: int) -> None:
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.budget -= num_new_tokens
        request.num_computed_tokens += num_new_tokens
        if request.num_computed_tokens == len(request.token_ids) + request.num_output_placeholders:
            request.num_output_placeholders += 1  # it has caught up, so the step samples its next token


def num_tokens_behind(request: Request, max_model_len: int) -> int:
    """Tokens that a running request could compute now. Its very last one is never fed back, so it is never computed."""
    longest = request.num_prompt_tokens + request.max_tokens
    if longest > max_model_len:
        longest = max_model_len
    known = len(request.token_ids) + request.num_output_placeholders
    return (known if known < longest else longest - 1) - request.num_computed_tokens
