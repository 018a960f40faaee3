"""What a caller reads of a model that pools."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.errors import RequestFailed
from inferd.engine.frontend.outputs import RequestOutput
from inferd.engine.pooling.vectors import to_little_endian, unpack


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of one request, whatever its task was."""

    request_id: str  # as the caller named it
    prompt_token_ids: list[int]
    pooled: bytes  # f32, in the machine's byte order
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> PoolingOutput:
        """Raises `RequestFailed` for a request that ended without its vector, as an aborted one does."""
        if output.pooled is None:
            raise RequestFailed(f"request {output.request_id} ended before its vector was there")
        return cls(output.request_id, output.prompt_token_ids, output.pooled, output.num_cached_tokens)

    @property
    def values(self) -> list[float]:
        return unpack(self.pooled)

    @property
    def little_endian(self) -> bytes:
        """f32, as other machines read it."""
        return to_little_endian(self.pooled)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]  # by label; what the head said where no activation was wanted
    labels: list[str]
    prompt_token_ids: list[int]

    @property
    def label(self) -> str:
        """The most likely one."""
        return self.labels[max(range(len(self.probs)), key=self.probs.__getitem__)]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """`rewards` by label; a reward model has one."""

    rewards: list[float]
    prompt_token_ids: list[int]

    @property
    def reward(self) -> float:
        return self.rewards[0]
