"""What the scheduler tells the workers each step, and what they answer.

New requests travel in full; requests that the workers know travel as differences. A preempted request is forgotten by
the workers and comes back as new, with all its tokens: one path, so worker state cannot drift from the scheduler's.
Block ids are one list per KV group.
"""

from __future__ import annotations

from typing import Any

import msgspec

from inferd.engine.logprobs import PromptChunk, TokenLogprobs
from inferd.engine.lora.adapter import NO_ADAPTER
from inferd.engine.messages import MultimodalFeature
from inferd.engine.params import SamplingParams
from inferd.engine.pooling.params import PoolingInput

BlockIds = tuple[list[int], ...]


class NewRequest(msgspec.Struct, array_like=True):
    request_id: str
    token_ids: list[int]  # prompt, and for a resumed request also what it had generated
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # always set: the request's own, or one drawn at admission
    block_ids: BlockIds
    num_computed_tokens: int
    features: list[MultimodalFeature] | None = None
    num_prompt_logprobs: int = 0  # of the first tokens after the prompt's very first: these have been computed before
    pooling: PoolingInput | None = None
    lora_id: int = NO_ADAPTER


class KnownRequests(msgspec.Struct, array_like=True):
    """Parallel lists over the scheduled requests that the workers already hold."""

    request_ids: list[str] = []
    new_block_ids: list[BlockIds | None] = []  # appended to the block table
    num_computed_tokens: list[int] = []


class SharedPrefix(msgspec.Struct, array_like=True):
    """Requests whose block tables begin with the same `num_blocks` blocks, all of them already computed.

    Attention may read those blocks once for all of them and merge by log-sum-exp.
    """

    num_blocks: int
    request_ids: list[str]


class SchedulerOutput(msgspec.Struct, array_like=True):
    step: int
    new: list[NewRequest]
    known: KnownRequests
    num_scheduled_tokens: dict[str, int]  # > 0 each
    total_num_scheduled_tokens: int  # the sum of the above
    shared_prefixes: list[SharedPrefix]  # disjoint
    finished_ids: list[str]  # forget these; sent even when nothing else runs
    preempted_ids: list[str]  # forget these too; they come back as new
    drafts: dict[str, list[int]] = {}  # guesses that follow on all known tokens, to be checked; counted in the above
    num_drafts_wanted: dict[str, int] = {}  # how many guesses are to be made after this step, at most

    @property
    def is_empty(self) -> bool:
        """Nothing to compute and nothing to forget."""
        return not (self.num_scheduled_tokens or self.finished_ids or self.preempted_ids)


class GrammarBitmask(msgspec.Struct, array_like=True):
    """What requests under a grammar may sample in a step; the others may sample anything.

    A request that samples several tokens has as many rows, in the order of its tokens.
    """

    request_ids: list[str]  # of each row
    words: Any  # numpy i32 [rows, ceil(vocab / 32)]; bit `id % 32` of word `id // 32`: whether the token may come


class GraphUse(msgspec.Struct, array_like=True, frozen=True):
    """A captured step that was replayed."""

    mode: str  # "decode", "decode_shared" where prefixes are attended once, "decode_lora" where rows have adapters
    size: int  # rows it was captured for


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """Sampled tokens by request id: none for a chunk that did not reach the request's last known token.

    Of a request with drafts: those that stand, and what was sampled in place of the first that does not, or on top.
    """

    sampled_token_ids: dict[str, list[int]]
    errors: dict[str, str] = {}  # request id → why it cannot go on; the others do
    logprobs: dict[str, TokenLogprobs] = {}  # of the sampled tokens, for requests that want them
    prompt_logprobs: dict[str, PromptChunk] = {}  # of the prompt tokens that this step went over
    pooled: dict[str, bytes] = {}  # f32, of requests that pool and whose last token this step computed
    num_corrupted: int = 0  # of `errors`: the model computed logits that are no numbers
    graph: GraphUse | None = None  # None: the step ran eagerly
    drafts: dict[str, list[int]] = {}  # guesses that follow on what was sampled
