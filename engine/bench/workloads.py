"""The work that is timed: random token ids, end-of-sequence ignored, fixed numbers of tokens out."""

from __future__ import annotations

import random
from dataclasses import dataclass

from msgspec.structs import replace

from inferd.engine.grammar.spec import StructuredOutput
from inferd.engine.params import SamplingParams

SAMPLED_TEMPERATURE = 0.8
SAMPLED_TOP_P = 0.95
LONG_LIST = """{"type": "array", "minItems": 100, "items": {"type": "object", "properties": {
    "name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "age", "tags"], "additionalProperties": false}}"""  # cannot end within any output here


@dataclass(frozen=True)
class Workload:
    name: str
    num_requests: int
    shared_tokens: int  # a prefix that all requests of a round have in common
    own_tokens: int
    output_tokens: int
    sampled: bool = False
    primed: bool = False  # the prefix was seen by an earlier request
    schema: str | None = None  # what the output is held to; an engine without grammars writes freely

    @property
    def total_output_tokens(self) -> int:
        return self.num_requests * self.output_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + self.own_tokens

    def params(self) -> SamplingParams:
        form = StructuredOutput(json_schema=self.schema) if self.schema is not None else None
        greedy = SamplingParams(max_tokens=self.output_tokens, ignore_eos=True, temperature=0.0, structured_output=form)
        if not self.sampled:
            return greedy
        return replace(greedy, temperature=SAMPLED_TEMPERATURE, top_p=SAMPLED_TOP_P, seed=1)

    def prompts(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        """A new prefix and new own tokens at each call."""
        prefix = self._tokens(rng, vocab_size, self.shared_tokens)
        return [prefix + self._tokens(rng, vocab_size, self.own_tokens) for _ in range(self.num_requests)]

    @staticmethod
    def _tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]


CPU_SUITE = (
    Workload("b1", num_requests=1, shared_tokens=0, own_tokens=128, output_tokens=128),
    Workload("b32", num_requests=32, shared_tokens=0, own_tokens=128, output_tokens=128),
    Workload("b32-sampled", num_requests=32, shared_tokens=0, own_tokens=128, output_tokens=128, sampled=True),
    Workload("b32-json", num_requests=32, shared_tokens=0, own_tokens=128, output_tokens=128, schema=LONG_LIST),
    Workload("prefix-cold", num_requests=16, shared_tokens=1024, own_tokens=32, output_tokens=32),
    Workload("prefix-warm", num_requests=16, shared_tokens=1024, own_tokens=32, output_tokens=32, primed=True),
)
