"""Batches of vectors and scores: what `LLM` offers over a model that pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import msgspec

from inferd.engine.errors import InvalidRequest
from inferd.engine.frontend.inputs import Prompt, TokensPrompt
from inferd.engine.messages import PoolingInfo
from inferd.engine.pooling.config import PoolingTask
from inferd.engine.pooling.inputs import PoolingPrompt, TextPair
from inferd.engine.pooling.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    RewardOutput,
    ScoringOutput,
)
from inferd.engine.pooling.params import PoolingParams
from inferd.engine.pooling.vectors import cosine


class PoolingCalls(ABC):
    """One output per prompt, in the order of the prompts. Each raises `NotSupported` for a model that cannot do it."""

    @property
    @abstractmethod
    def pooling(self) -> PoolingInfo | None:
        """What the loaded model can be asked for; None of one that generates."""

    @abstractmethod
    def _pool(self, prompts: Sequence[PoolingPrompt], params: PoolingParams, progress: bool) -> list[PoolingOutput]: ...

    def embed(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None, *, progress: bool = True
    ) -> list[EmbeddingOutput]:
        """Vectors of texts. They have length 1 where the model's authors, or `params.normalize`, want it."""
        outputs = self._pool(as_list(prompts), _for_task(params, "embed"), progress)
        return [EmbeddingOutput(output.values, output.prompt_token_ids) for output in outputs]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None, *, progress: bool = True
    ) -> list[ClassificationOutput]:
        """Probabilities of the labels of a model with a classification head."""
        outputs = self._pool(as_list(prompts), _for_task(params, "classify"), progress)
        labels = self.pooling.labels if self.pooling is not None else []
        return [ClassificationOutput(output.values, labels, output.prompt_token_ids) for output in outputs]

    def reward(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None, *, progress: bool = True
    ) -> list[RewardOutput]:
        """What the head of a reward model says, without an activation."""
        outputs = self._pool(as_list(prompts), _for_task(params, "reward"), progress)
        return [RewardOutput(output.values, output.prompt_token_ids) for output in outputs]

    def score(
        self,
        texts: str | Sequence[str],
        others: str | Sequence[str],
        params: PoolingParams | None = None,
        *,
        progress: bool = True,
    ) -> list[ScoringOutput]:
        """How well each of `others` goes with its text; one text goes with all of them.

        A cross-encoder reads both together and its head decides. Of an embedder it is the cosine of both vectors.
        """
        pairs = make_pairs(texts, others)
        tasks = self.pooling.tasks if self.pooling is not None else []
        if "score" in tasks or "embed" not in tasks:
            return [
                ScoringOutput(output.values[0]) for output in self._pool(pairs, _for_task(params, "score"), progress)
            ]
        unique = list(dict.fromkeys(text for pair in pairs for text in (pair.first, pair.second)))
        outputs = self._pool(unique, for_embedding(params), progress)
        vectors = {text: output.pooled for text, output in zip(unique, outputs, strict=True)}
        return [ScoringOutput(cosine(vectors[pair.first], vectors[pair.second])) for pair in pairs]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str | TokensPrompt) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def make_pairs(texts: str | Sequence[str], others: str | Sequence[str]) -> list[TextPair]:
    """Raises `InvalidRequest` where it is not clear which goes with which."""
    firsts = [texts] if isinstance(texts, str) else list(texts)
    seconds = [others] if isinstance(others, str) else list(others)
    if not firsts or not seconds:
        raise InvalidRequest("there is nothing to score; give at least one text on each side", param="texts")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(f"{len(firsts)} texts and {len(seconds)} others make no pairs", param="texts")
    return [TextPair(first, second) for first, second in zip(firsts, seconds, strict=True)]


def for_embedding(params: PoolingParams | None) -> PoolingParams:
    """What of a score's parameters is for the embeddings that it is made of. Raises `InvalidRequest` for the rest."""
    if params is not None and params.activation is not None:
        raise InvalidRequest(
            "this model's scores are cosines, which have no activation; leave it out", param="activation"
        )
    limit = params.truncate_prompt_tokens if params is not None else None
    return PoolingParams(task="embed", truncate_prompt_tokens=limit)


def _for_task(params: PoolingParams | None, task: PoolingTask) -> PoolingParams:
    return PoolingParams(task=task) if params is None else msgspec.structs.replace(params, task=task)
