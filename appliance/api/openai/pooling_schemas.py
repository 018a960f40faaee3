"""Requests and answers of the routes to models that pool: embeddings, scores, ranks."""

from __future__ import annotations

from typing import Literal

import msgspec

# --- requests -------------------------------------------------------------------------------------------------------


class PoolingRequest(msgspec.Struct, kw_only=True):
    """What these routes have in common. `PoolingParams` checks the numbers."""

    model: str
    truncate_prompt_tokens: int | None = None


class EmbeddingRequest(PoolingRequest, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class ScoreRequest(PoolingRequest, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    activation: bool | None = None


class TextDocument(msgspec.Struct):
    text: str


class RerankRequest(PoolingRequest, kw_only=True):
    query: str
    documents: list[str | TextDocument]
    top_n: int | None = None  # 0, as some clients send it: all
    return_documents: bool | None = None
    activation: bool | None = None


# --- answers --------------------------------------------------------------------------------------------------------


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str  # base64 of little-endian float32
    object: Literal["embedding"] = "embedding"


class EmbeddingAnswer(msgspec.Struct):
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class Score(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class RankedDocument(msgspec.Struct):
    index: int  # among the request's documents
    relevance_score: float
    document: TextDocument | msgspec.UnsetType = msgspec.UNSET


class RerankAnswer(msgspec.Struct):
    id: str
    model: str
    results: list[RankedDocument]  # best first
    usage: PoolingUsage
