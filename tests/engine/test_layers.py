"""Layers alone: what each rank of a group holds and computes, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inferd.engine.config import RopeConfig
from inferd.engine.errors import ConfigError
from inferd.engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from inferd.engine.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from inferd.engine.layers.norm import RMSNorm
from inferd.engine.layers.parallel import TensorParallel
from inferd.engine.layers.rotary import rope_table
from inferd.engine.layers.target import BuildTarget
from inferd.engine.layers.weights import WeightLayer, WeightMismatch
from inferd.kernels.select import build_ops

CPU = torch.device("cpu")
OPS = build_ops(CPU, torch.float32, "torch")


class LoneRank(TensorParallel):
    """One rank of a group without the others: what it would send them is what it returns."""

    def __post_init__(self) -> None: ...


def make_target(rank: int = 0, size: int = 1) -> BuildTarget:
    return BuildTarget(OPS, "float32", CPU, LoneRank(rank, size))


def loaded(layer: WeightLayer, **tensors: Tensor) -> WeightLayer:
    """`weight_q=...` fills shard q of the weight, `weight=...` the whole."""
    for key, tensor in tensors.items():
        name, _, shard = key.partition("_")
        layer.weight_loader(name, tensor, shard or None)
    layer.prepare()
    return layer


@pytest.mark.parametrize("size", [1, 2, 3])
def test_column_parallel_ranks_join(size: int) -> None:
    weight, bias, x = torch.randn(6, 5), torch.randn(6), torch.randn(4, 5)
    parts = [
        loaded(ColumnParallelLinear(5, 6, True, make_target(rank, size)), weight=weight, bias=bias).forward(x)
        for rank in range(size)
    ]
    torch.testing.assert_close(torch.cat(parts, -1), x @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_row_parallel_ranks_sum_with_the_bias_once(size: int) -> None:
    weight, bias, x = torch.randn(5, 6), torch.randn(5), torch.randn(4, 6)
    parts = [
        loaded(RowParallelLinear(6, 5, True, make_target(rank, size)), weight=weight, bias=bias).forward(x_local)
        for rank, x_local in enumerate(x.chunk(size, -1))
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), x @ weight.T + bias)


def test_merged_shards_before_it_joins() -> None:
    gate, up, x = torch.randn(4, 5), torch.randn(4, 5), torch.randn(3, 5)
    layer = MergedColumnParallelLinear(5, {"gate": 4, "up": 4}, False, make_target(1, 2))
    out = loaded(layer, weight_up=up, weight_gate=gate).forward(x)
    torch.testing.assert_close(out, torch.cat((x @ gate[2:].T, x @ up[2:].T), -1))


@pytest.mark.parametrize(
    ("size", "rank", "query_heads", "kv_heads"),
    [
        (1, 0, [0, 1, 2, 3], [0, 1]),
        (2, 1, [2, 3], [1]),
        (4, 0, [0], [0]),
        (4, 1, [1], [0]),  # two ranks for each key-value head
        (4, 2, [2], [1]),
    ],
)
def test_qkv_heads_of_a_rank(size: int, rank: int, query_heads: list[int], kv_heads: list[int]) -> None:
    head_size, x = 3, torch.randn(2, 5)
    q, k, v = torch.randn(4, head_size, 5), torch.randn(2, head_size, 5), torch.randn(2, head_size, 5)
    biases = torch.randn(4, head_size), torch.randn(2, head_size), torch.randn(2, head_size)
    layer = QKVParallelLinear(5, head_size, (4, 2), True, make_target(rank, size))
    assert (layer.num_heads, layer.num_kv_heads) == (len(query_heads), len(kv_heads))
    tensors = {f"weight_{name}": whole.flatten(0, 1) for name, whole in zip("qkv", (q, k, v), strict=True)}
    tensors |= {f"bias_{name}": whole.flatten() for name, whole in zip("qkv", biases, strict=True)}
    heads = [(q, biases[0], query_heads), (k, biases[1], kv_heads), (v, biases[2], kv_heads)]
    expected = [x @ w[index].T + b[index] for w, b, indices in heads for index in indices]
    torch.testing.assert_close(loaded(layer, **tensors).forward(x), torch.cat(expected, -1))


@pytest.mark.parametrize(
    ("heads", "size", "message"),
    [((4, 4), 3, "num_heads=4"), ((6, 2), 3, "num_kv_heads=2"), ((12, 4), 6, "num_kv_heads=4")],
)
def test_heads_that_ranks_cannot_share(heads: tuple[int, int], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QKVParallelLinear(5, 3, heads, False, make_target(0, size))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_odd_vocabulary_over_ranks(size: int) -> None:
    weight, token_ids = torch.randn(7, 3), torch.tensor([0, 6, 3, 4, 1, 5])
    targets = [make_target(rank, size) for rank in range(size)]
    embedded = [loaded(VocabParallelEmbedding(7, 3, target), weight=weight).forward(token_ids) for target in targets]
    torch.testing.assert_close(torch.stack(embedded).sum(0), weight[token_ids])
    hidden = torch.randn(2, 3)
    logits = [loaded(ParallelLMHead(7, 3, target), weight=weight).forward(hidden) for target in targets]
    torch.testing.assert_close(torch.cat(logits, -1)[:, :7], hidden @ weight.T)


def test_tied_head_reads_the_embedding() -> None:
    weight, hidden = torch.randn(7, 3), torch.randn(2, 3)
    embedding = VocabParallelEmbedding(7, 3, make_target())
    head = ParallelLMHead(7, 3, make_target(), embedding.table)
    loaded(embedding, weight=weight)
    assert not head.placements
    torch.testing.assert_close(loaded(head).forward(hidden), hidden @ weight.T)


def test_weights_are_converted_while_they_are_copied() -> None:
    weight = torch.randn(3, 2)
    norm = RMSNorm(3, 1e-6, make_target())
    assert norm.weight_loader("weight", weight[:, 0].double()) == 3 * 4
    torch.testing.assert_close(norm.weight.data, weight[:, 0])


def test_wrong_shape_names_both() -> None:
    layer = MergedColumnParallelLinear(5, {"gate": 4, "up": 4}, False, make_target())
    with pytest.raises(WeightMismatch, match=r"\[5, 4\].*\[4, 5\]"):
        layer.weight_loader("weight", torch.zeros(5, 4), "gate")


def test_linear_before_prepare_says_so() -> None:
    with pytest.raises(RuntimeError, match="before prepare"):
        ColumnParallelLinear(2, 2, False, make_target()).forward(torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match="before prepare"):
        ParallelLMHead(2, 2, make_target()).forward(torch.zeros(1, 2))


def test_rope_table_holds_cosines_then_sines() -> None:
    table = rope_table(RopeConfig(theta=100.0), 4, 8, CPU)
    assert table.shape == (8, 4)
    assert table.dtype == torch.float32
    angles = [5 * 1.0, 5 * 0.1]
    expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
    torch.testing.assert_close(table[5], torch.tensor(expected))


def test_linear_scaling_stretches_positions() -> None:
    plain = rope_table(RopeConfig(), 6, 8, CPU)
    stretched = rope_table(RopeConfig(scaling="linear", factor=2.0), 6, 16, CPU)
    torch.testing.assert_close(stretched[::2], plain)


def test_llama3_scaling_keeps_fast_waves_and_stretches_slow_ones() -> None:
    rope = RopeConfig(theta=1e6, scaling="llama3", factor=8.0, original_max_position=64)
    scaled, plain = rope_table(rope, 16, 9, CPU), rope_table(RopeConfig(theta=1e6), 16, 9, CPU)
    torch.testing.assert_close(scaled[:, 0], plain[:, 0])
    torch.testing.assert_close(scaled[8, -1], plain[1, -1])
