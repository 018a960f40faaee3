"""What a BERT-like model's config.json says: tokens that see all others, learned positions, perhaps a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferd.engine.config import Activation, Dtype, ModelConfig, RopeConfig
from inferd.engine.model_fields import Fields
from inferd.engine.pooling.config import EncoderConfig
from inferd.engine.pooling.folder import read_classifier, read_embedder

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class EncoderArchitecture:
    has_head: bool = False
    counts_from_padding: bool = False  # a text's first position is the row after the padding token's id


ENCODERS: Mapping[str, EncoderArchitecture] = {
    "BertForMaskedLM": EncoderArchitecture(),  # only its hidden states are used
    "BertForSequenceClassification": EncoderArchitecture(has_head=True),
    "BertModel": EncoderArchitecture(),
    "RobertaForMaskedLM": EncoderArchitecture(counts_from_padding=True),
    "RobertaForSequenceClassification": EncoderArchitecture(has_head=True, counts_from_padding=True),
    "RobertaModel": EncoderArchitecture(counts_from_padding=True),
    "XLMRobertaForMaskedLM": EncoderArchitecture(counts_from_padding=True),
    "XLMRobertaForSequenceClassification": EncoderArchitecture(has_head=True, counts_from_padding=True),
    "XLMRobertaModel": EncoderArchitecture(counts_from_padding=True),
}


def read_encoder(fields: Fields, name: str, *, eos_token_ids: tuple[int, ...], dtype: Dtype) -> ModelConfig:
    """Raises `LoadError` naming the field that is missing, wrong or unsupported."""
    architecture = ENCODERS[name]
    _refuse_other_kinds(fields)
    num_heads, hidden_size = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    if hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is not a multiple of {num_heads} heads")
    first_position = _first_position(fields) if architecture.counts_from_padding else 0
    max_position = fields.whole("max_position_embeddings") - first_position
    if max_position < 1:
        raise fields.error("max_position_embeddings", f"leaves no position after the first {first_position}")
    return ModelConfig(
        path=fields.path.parent,
        architecture=name,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        rope=RopeConfig(),
        max_position=max_position,
        tie_embeddings=False,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        sliding_window=None,
        eos_token_ids=eos_token_ids,
        bos_token_id=fields.optional_whole("bos_token_id"),
        checkpoint_dtype=dtype,
        activation=_activation(fields),
        encoder=EncoderConfig(
            num_token_types=fields.whole("type_vocab_size", 2),
            first_position=first_position,
        ),
        pooler=read_classifier(fields, "cls") if architecture.has_head else read_embedder(fields, "encoder"),
    )


def _first_position(fields: Fields) -> int:
    pad_token_id = fields.optional_whole("pad_token_id")
    return 1 + (1 if pad_token_id is None else pad_token_id)


def _refuse_other_kinds(fields: Fields) -> None:
    if fields.flag("is_decoder", False):
        raise fields.error("is_decoder", "an encoder that is used as a decoder is not supported")
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise fields.error("position_embedding_type", f'"{kind}" is not supported, only "absolute"')


def _activation(fields: Fields) -> Activation:
    given = fields.text("hidden_act", "gelu")
    if given not in _ACTIVATIONS:
        raise fields.error("hidden_act", f'"{given}" is not supported; supported: {", ".join(_ACTIVATIONS)}')
    return _ACTIVATIONS[given]
