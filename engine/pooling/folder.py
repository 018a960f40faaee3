"""A model folder's files → `PoolerConfig`."""

from __future__ import annotations

from typing import Any, Literal

from inferd.engine.model_fields import Fields
from inferd.engine.pooling.config import HEAD_TASKS, SCORE, Activation, PoolerConfig, PoolingType
from inferd.engine.pooling.sentence_transformers import read_sentence_model

ModelKind = Literal["causal", "decoder", "encoder"]  # with a head of logits; without; and one whose tokens see all
MAX_LABELS = 100_000
# By the last name of the class that cross-encoders are saved with.
_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid"}


def embedder(pooling: PoolingType) -> PoolerConfig:
    """Of a model that says nothing about it itself."""
    return PoolerConfig(pooling, ("embed",), normalize=True)


def read_embedder(fields: Fields, kind: ModelKind) -> PoolerConfig | None:
    """From the files of sentence-transformers. Without them an encoder's mean and a decoder's last state are taken, and
    a model that generates is no embedder: None. Raises `LoadError`."""
    sentence = read_sentence_model(fields.path.parent)
    if sentence is None:
        return None if kind == "causal" else embedder("mean" if kind == "encoder" else "last")
    return PoolerConfig(
        sentence.pooling,
        ("embed",),
        normalize=sentence.normalize,
        max_tokens=sentence.max_tokens,
        lower_case=sentence.lower_case,
        matryoshka_sizes=_matryoshka_sizes(fields),
    )


def read_classifier(fields: Fields, pooling: PoolingType) -> PoolerConfig:
    """Of a model with a classification head. Raises `LoadError`."""
    labels = _labels(fields)
    tasks = (*HEAD_TASKS, SCORE) if len(labels) == 1 else HEAD_TASKS
    return PoolerConfig(pooling, tasks, labels=labels, activation=_activation(fields, len(labels)))


def _labels(fields: Fields) -> tuple[str, ...]:
    """In the order of the head's outputs. A config.json that names none has two."""
    named = fields.values.get("id2label")
    if named is None:
        count = fields.whole("num_labels", 2)
        if count > MAX_LABELS:
            raise fields.error("num_labels", f"{count} labels are too many")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(named, dict) or set(named) != set(map(str, range(len(named)))) or not named:
        raise fields.error("id2label", "must name each of the labels from 0 on")
    return tuple(str(named[str(index)]) for index in range(len(named)))


def _activation(fields: Fields, num_labels: int) -> Activation:
    """The authors' own for a cross-encoder, else what the kind of problem asks for."""
    own = fields.values.get("sentence_transformers")
    class_name: Any = own.get("activation_fn") if isinstance(own, dict) else None
    class_name = class_name or fields.values.get("sbert_ce_default_activation_function")
    if class_name is not None:
        name = str(class_name).rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise fields.error("activation_fn", f"{class_name} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]
    problem = fields.values.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or num_labels == 1 else "softmax"


def _matryoshka_sizes(fields: Fields) -> tuple[int, ...] | None:
    sizes = fields.values.get("matryoshka_dimensions")
    if sizes is not None:
        if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
            raise fields.error("matryoshka_dimensions", "must be a list of sizes")
        return tuple(sizes)
    return () if fields.flag("is_matryoshka", False) else None
