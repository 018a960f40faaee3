"""What becomes of a pooled vector by a request's parameters, and how it travels. Numpy, no torch."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from inferd.engine.pooling.config import Activation, PoolerConfig
from inferd.engine.pooling.params import PoolingParams

Vector = NDArray[np.float32]


def finish(vector: Vector, params: PoolingParams, pooler: PoolerConfig) -> bytes:
    """vector[d], of hidden states or as a head gave it -> the result, f32 in the machine's byte order."""
    if params.task == "embed":
        cut = vector[: params.dimensions]
        normalize = pooler.normalize if params.normalize is None else params.normalize
        return np.ascontiguousarray(_normalized(cut) if normalize else cut).tobytes()
    activate = params.task != "reward" if params.activation is None else params.activation
    return (activated(vector, pooler.activation) if activate else vector).tobytes()


def activated(labels: Vector, activation: Activation) -> Vector:
    """labels[n] -> [n]; softmax and sigmoid in double precision, rounded once."""
    if activation == "identity":
        return labels
    values = labels.astype(np.float64)
    if activation == "softmax":
        powers = np.exp(values - values.max())
        softmax: Vector = (powers / powers.sum()).astype(np.float32)
        return softmax
    half = np.exp(-np.abs(values))  # never overflows
    sigmoid: Vector = (np.where(values >= 0, 1.0, half) / (1.0 + half)).astype(np.float32)
    return sigmoid


def unpack(pooled: bytes) -> list[float]:
    return array("f", pooled).tolist()


def to_little_endian(pooled: bytes) -> bytes:
    return np.frombuffer(pooled, np.float32).astype("<f4").tobytes()


def cosine(a: bytes, b: bytes) -> float:
    """Of two packed vectors of one length; 0 for a vector of zeros, which has no direction."""
    first, second = (np.frombuffer(pooled, np.float32).astype(np.float64) for pooled in (a, b))
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0


def _normalized(vector: Vector) -> Vector:
    length = np.linalg.norm(vector.astype(np.float64))
    return (vector / length).astype(np.float32) if length else vector
