"""The blocks that decoder models share; a model file says only how its own differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inferd.engine.config import ModelConfig
from inferd.engine.layers.attention import Attention, Scores
from inferd.engine.layers.embedding import VocabParallelEmbedding
from inferd.engine.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from inferd.engine.layers.norm import RMSNorm
from inferd.engine.layers.rotary import RopeTable
from inferd.engine.models.base import BuildContext

# Submodules are registered for their names and weights; the hot path calls bound methods kept as plain attributes,
# because finding a submodule on an nn.Module takes as long as a small kernel's launch.


@dataclass(frozen=True)
class AttentionTraits:
    """How architectures differ in attention."""

    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: type[RMSNorm] | None = None  # of each head of q and k before rotation


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer stands in its model, and the angles that it rotates by."""

    index: int
    rope: RopeTable

    @property
    def name(self) -> str:
        return f"model.layers.{self.index}"


class RopeAttention(nn.Module):
    """hidden[t, h] -> [t, h]: fused q, k, v, rotary embedding, grouped heads over paged memory."""

    def __init__(self, config: ModelConfig, traits: AttentionTraits, place: LayerPlace, context: BuildContext) -> None:
        super().__init__()
        heads, head_size = (config.num_heads, config.num_kv_heads), config.head_size
        self.qkv_proj = QKVParallelLinear(config.hidden_size, head_size, heads, traits.qkv_bias, context)
        self.o_proj = RowParallelLinear(config.num_heads * head_size, config.hidden_size, traits.output_bias, context)
        self._norms = None
        if traits.head_norm is not None:
            self.q_norm = traits.head_norm(head_size, config.norm_eps, context)
            self.k_norm = traits.head_norm(head_size, config.norm_eps, context)
            self._norms = self.q_norm.forward, self.k_norm.forward
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        scale = config.attention_scale or head_size**-0.5
        scores = Scores(scale, config.window_of(place.index), config.attention_softcap)
        name = f"{place.name}.self_attn.attn"
        self.attention = Attention(name, num_kv_heads, head_size, place.rope, scores, context)
        self._split = (num_heads, num_kv_heads, num_kv_heads)
        self._heads = (num_heads + 2 * num_kv_heads, head_size)
        self._output_size = num_heads * head_size
        self._qkv, self._attend, self._output = self.qkv_proj.forward, self.attention.forward, self.o_proj.forward

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        num_tokens = hidden.shape[0]
        heads = self._qkv(hidden).view(num_tokens, *self._heads)
        q, k, v = heads.split_with_sizes(self._split, 1)  # views of one projection
        if self._norms is not None:
            norm_q, norm_k = self._norms
            q, k = norm_q(q), norm_k(k)
        return self._output(self._attend(q, k, v, positions).view(num_tokens, self._output_size))


class GatedMLP(nn.Module):
    """hidden[t, h] -> [t, h]: down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, {"gate": size, "up": size}, bias, context)
        self.down_proj = RowParallelLinear(size, hidden_size, bias, context)
        self._gate_up, self._down = self.gate_up_proj.forward, self.down_proj.forward
        self._act_mul = context.ops.silu_mul if config.activation == "silu" else context.ops.gelu_mul

    def forward(self, hidden: Tensor) -> Tensor:
        return self._down(self._act_mul(self._gate_up(hidden)))


class Layer(nn.Module, ABC):
    """One layer over the residual stream."""

    self_attn: RopeAttention

    @abstractmethod
    def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The stream is hidden + residual, going in and out; `residual` is None where it begins."""


MakeLayer = Callable[[ModelConfig, AttentionTraits, LayerPlace, BuildContext], Layer]


class DecoderLayer(Layer):
    """Attention and MLP, each after a norm. The residual stream is summed inside the next norm."""

    def __init__(self, config: ModelConfig, traits: AttentionTraits, place: LayerPlace, context: BuildContext) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, context)
        self.self_attn = RopeAttention(config, traits, place, context)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, context)
        self.mlp = GatedMLP(config, context)
        self._first_norm, self._add_norm = self.input_layernorm.forward, self.input_layernorm.add
        self._add_second_norm = self.post_attention_layernorm.add
        self._attention, self._mlp = self.self_attn.forward, self.mlp.forward

    def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        if residual is None:
            normed, residual = self._first_norm(hidden), hidden
        else:
            normed, residual = self._add_norm(hidden, residual)
        normed, residual = self._add_second_norm(self._attention(normed, positions), residual)
        return self._mlp(normed), residual


@dataclass(frozen=True)
class DecoderTraits:
    """How architectures differ from Llama."""

    attention: AttentionTraits = AttentionTraits()
    layer: MakeLayer = DecoderLayer
    norm: type[RMSNorm] = RMSNorm  # the last one
    embedding_scale: float | None = None


class DecoderStack(nn.Module):
    """One pipeline stage: `context.layers` of the model, the embedding before the first, the norm after the last."""

    def __init__(self, config: ModelConfig, traits: DecoderTraits, context: BuildContext) -> None:
        super().__init__()
        stage = context.layers
        self.is_first, self.is_last = stage.start == 0, stage.stop == config.num_layers
        ropes = dict.fromkeys(config.rope_of(index) for index in stage)
        tables = {rope: RopeTable(rope, config.head_size, context.num_positions, context.device) for rope in ropes}
        if self.is_first:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        places = [LayerPlace(index, tables[config.rope_of(index)]) for index in stage]
        layers = {str(place.index): traits.layer(config, traits.attention, place, context) for place in places}
        self.layers = nn.ModuleDict(layers)
        if self.is_last:
            self.norm = traits.norm(config.hidden_size, config.norm_eps, context)
        self.rope_tables = list(tables.values())
        self.attentions = [layer.self_attn.attention for layer in layers.values()]
        self._embedding_scale = None
        if traits.embedding_scale is not None:  # rounded as the models were trained
            self._embedding_scale = torch.tensor(traits.embedding_scale, dtype=context.torch_dtype).item()
        self._layers = [layer.forward for layer in layers.values()]

    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None, hidden: Tensor | None
    ) -> Tensor:
        """See `CausalLM.forward`. Between stages travels the summed stream, [t, h]."""
        if self.is_first:
            hidden = self._embed(token_ids) if inputs_embeds is None else inputs_embeds
        if hidden is None:
            raise ValueError("a later pipeline stage needs the hidden states of the stage before it")
        residual: Tensor | None = None
        for layer in self._layers:
            hidden, residual = layer(hidden, residual, positions)
        if residual is None:
            raise ValueError("a pipeline stage without layers cannot run")
        return self.norm.add(hidden, residual)[0] if self.is_last else hidden + residual

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens.forward(token_ids)
        return hidden if self._embedding_scale is None else hidden.mul_(self._embedding_scale)
