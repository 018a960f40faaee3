"""The blocks that decoder models share; a model file says only how its own differ."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from inferd.engine.config import ModelConfig
from inferd.engine.layers.attention import Attention
from inferd.engine.layers.embedding import VocabParallelEmbedding
from inferd.engine.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from inferd.engine.layers.norm import RMSNorm
from inferd.engine.layers.rotary import rope_table
from inferd.engine.models.base import BuildContext

# Submodules are registered for their names and weights; the hot path calls bound methods kept as plain attributes,
# because finding a submodule on an nn.Module takes as long as a small kernel's launch.


@dataclass(frozen=True)
class AttentionTraits:
    """How architectures differ in attention."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head of q and k before rotation
    window: int | None = None


class RopeAttention(nn.Module):
    """hidden[t, h] -> [t, h]: fused q, k, v, rotary embedding, grouped heads over paged memory."""

    def __init__(
        self, config: ModelConfig, traits: AttentionTraits, name: str, cos_sin: Tensor, context: BuildContext
    ) -> None:
        super().__init__()
        heads, head_size = (config.num_heads, config.num_kv_heads), config.head_size
        self.qkv_proj = QKVParallelLinear(config.hidden_size, head_size, heads, traits.qkv_bias, context)
        self.o_proj = RowParallelLinear(config.num_heads * head_size, config.hidden_size, traits.output_bias, context)
        self._norms = None
        if traits.qk_norm:
            self.q_norm = RMSNorm(head_size, config.norm_eps, context)
            self.k_norm = RMSNorm(head_size, config.norm_eps, context)
            self._norms = self.q_norm.forward, self.k_norm.forward
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.attention = Attention(f"{name}.attn", num_kv_heads, head_size, cos_sin, traits.window, context)
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
    """hidden[t, h] -> [t, h]: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, {"gate": size, "up": size}, bias, context)
        self.down_proj = RowParallelLinear(size, hidden_size, bias, context)
        self._gate_up, self._down = self.gate_up_proj.forward, self.down_proj.forward
        self._silu_mul = context.ops.silu_mul

    def forward(self, hidden: Tensor) -> Tensor:
        return self._down(self._silu_mul(self._gate_up(hidden)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm. The residual stream is summed inside the next norm."""

    def __init__(
        self, config: ModelConfig, traits: AttentionTraits, name: str, cos_sin: Tensor, context: BuildContext
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, context)
        self.self_attn = RopeAttention(config, traits, f"{name}.self_attn", cos_sin, context)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, context)
        self.mlp = GatedMLP(config, context)
        self._first_norm, self._add_norm = self.input_layernorm.forward, self.input_layernorm.add
        self._add_second_norm = self.post_attention_layernorm.add
        self._attention, self._mlp = self.self_attn.forward, self.mlp.forward

    def forward(self, hidden: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The stream is hidden + residual, going in and out; `residual` is None where it begins."""
        if residual is None:
            normed, residual = self._first_norm(hidden), hidden
        else:
            normed, residual = self._add_norm(hidden, residual)
        normed, residual = self._add_second_norm(self._attention(normed, positions), residual)
        return self._mlp(normed), residual


class DecoderStack(nn.Module):
    """One pipeline stage: `context.layers` of the model, the embedding before the first, the norm after the last."""

    def __init__(self, config: ModelConfig, traits: AttentionTraits, context: BuildContext) -> None:
        super().__init__()
        stage = context.layers
        self.is_first, self.is_last = stage.start == 0, stage.stop == config.num_layers
        cos_sin = rope_table(config.rope, config.head_size, context.num_positions, context.device)
        if self.is_first:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        layers = {
            str(index): DecoderLayer(config, traits, f"model.layers.{index}", cos_sin, context) for index in stage
        }
        self.layers = nn.ModuleDict(layers)
        if self.is_last:
            self.norm = RMSNorm(config.hidden_size, config.norm_eps, context)
        self.attentions = [layer.self_attn.attention for layer in layers.values()]
        self._layers = [layer.forward for layer in layers.values()]

    def forward(
        self, token_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None, hidden: Tensor | None
    ) -> Tensor:
        """See `CausalLM.forward`. Between stages travels the summed stream, [t, h]."""
        if self.is_first:
            hidden = self.embed_tokens.forward(token_ids) if inputs_embeds is None else inputs_embeds
        if hidden is None:
            raise ValueError("a later pipeline stage needs the hidden states of the stage before it")
        residual: Tensor | None = None
        for layer in self._layers:
            hidden, residual = layer(hidden, residual, positions)
        if residual is None:
            raise ValueError("a pipeline stage without layers cannot run")
        return self.norm.add(hidden, residual)[0] if self.is_last else hidden + residual
