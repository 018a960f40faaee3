"""BERT and RoBERTa (Devlin et al., 2018; Liu et al., 2019): every token sees its whole text, norms follow sublayers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from inferd.engine.config import Activation, ModelConfig
from inferd.engine.core.kv.spec import KVSpec
from inferd.engine.layers.attention import EncoderAttention
from inferd.engine.layers.embedding import ReplicatedEmbedding, VocabParallelEmbedding
from inferd.engine.layers.head import LabelHead
from inferd.engine.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from inferd.engine.layers.norm import LayerNorm
from inferd.engine.layers.weights import WeightLayer
from inferd.engine.models.base import BuildContext
from inferd.engine.pooling.config import EncoderConfig


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
}


class BertEmbeddings(nn.Module):
    """token_ids[t], positions[t], token_types[t] | None -> [t, h]: the sum of three tables' rows, normed."""

    def __init__(self, config: ModelConfig, encoder: EncoderConfig, context: BuildContext) -> None:
        super().__init__()
        size = config.hidden_size
        self._first_position = encoder.first_position
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, size, context)
        self.position_embeddings = ReplicatedEmbedding(config.max_position + encoder.first_position, size, context)
        self.token_type_embeddings = ReplicatedEmbedding(encoder.num_token_types, size, context)
        self.norm = LayerNorm(size, config.norm_eps, context)

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        words = self.word_embeddings.forward(token_ids)
        places = self.position_embeddings.forward(positions + self._first_position)
        types = self.token_type_embeddings
        of_type = types.table[0] if token_types is None else types.forward(token_types)
        return self.norm.forward(words + of_type + places)


class BertLayer(nn.Module):
    """hidden[t, h] -> [t, h]: attention, then two linears; each is added to what went in, and the sum is normed."""

    def __init__(self, config: ModelConfig, index: int, context: BuildContext) -> None:
        super().__init__()
        hidden_size, inner, head_size = config.hidden_size, config.intermediate_size, config.head_size
        heads = (config.num_heads, config.num_kv_heads)
        self.qkv_proj = QKVParallelLinear(hidden_size, head_size, heads, True, context)
        self.o_proj = RowParallelLinear(config.num_heads * head_size, hidden_size, True, context)
        self.attention_norm = LayerNorm(hidden_size, config.norm_eps, context)
        self.up_proj = ColumnParallelLinear(hidden_size, inner, True, context)
        self.down_proj = RowParallelLinear(inner, hidden_size, True, context)
        self.output_norm = LayerNorm(hidden_size, config.norm_eps, context)
        self.attention = EncoderAttention(f"layers.{index}.attention", self.qkv_proj.num_heads, head_size, context)
        self._activation = _ACTIVATIONS[config.activation]
        self._heads = (3 * self.qkv_proj.num_heads, head_size)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv_proj.forward(hidden).view(hidden.shape[0], *self._heads)
        attended = self.attention.forward(*heads.chunk(3, dim=1)).flatten(1)
        hidden = self.attention_norm.forward(hidden + self.o_proj.forward(attended))
        inner = self._activation(self.up_proj.forward(hidden))
        return self.output_norm.forward(hidden + self.down_proj.forward(inner))


class BertHead(nn.Module):
    """first[m, h] f32 -> [m, labels] f32: a layer with tanh, then the labels'."""

    def __init__(self, hidden_size: int, num_labels: int, context: BuildContext) -> None:
        super().__init__()
        self.dense = LabelHead(hidden_size, hidden_size, True, context)
        self.out_proj = LabelHead(hidden_size, num_labels, True, context)

    def forward(self, first: Tensor) -> Tensor:
        return self.out_proj.forward(torch.tanh(self.dense.forward(first)))


class BertModel(nn.Module):
    """Implements `PoolingModel`, with a head where the configuration has labels."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        if config.encoder is None or context.layers != range(config.num_layers):
            raise ValueError(f"{config.architecture} is an encoder, and whole on each rank's stage")
        self._num_positions = config.max_position
        self.embeddings = BertEmbeddings(config, config.encoder, context)
        self.layers = nn.ModuleList(BertLayer(config, index, context) for index in context.layers)
        labels = config.pooler.labels if config.pooler is not None else ()
        self.head = BertHead(config.hidden_size, len(labels), context) if labels else None
        self._layers: list[BertLayer] = list(self.layers)  # type: ignore[arg-type]

    def forward(self, token_ids: Tensor, positions: Tensor, *, token_types: Tensor | None = None) -> Tensor:
        hidden = self.embeddings.forward(token_ids, positions, token_types)
        for layer in self._layers:
            hidden = layer.forward(hidden)
        return hidden

    def classify(self, pooled: Tensor) -> Tensor:
        if self.head is None:
            raise RuntimeError("labels were asked of a model without a head")
        return self.head.forward(pooled)

    def kv_specs(self, block_size: int) -> dict[str, KVSpec]:
        return {layer.attention.name: layer.attention.kv_spec(block_size) for layer in self._layers}

    def reserve_positions(self, num_positions: int) -> None:
        """Nothing to do: positions are learned, and `resolve` allows no more than there are."""
        if num_positions > self._num_positions:
            raise ValueError(f"{num_positions} positions were asked of a table of {self._num_positions}")

    def weight_layers(self) -> Iterator[tuple[str, WeightLayer]]:
        for name, module in self.named_modules():
            if isinstance(module, WeightLayer):
                yield name, module

    def prepare(self) -> None:
        for _, layer in self.weight_layers():
            layer.prepare()
